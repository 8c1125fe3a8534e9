"""A card that is not there, for trials: times that are given, under a clock that its trials and compilations move."""

from fp8engine.kernels.tuning import Config
from fp8engine.ops.card_trials import CardTrials
from fp8engine.ops.choice_file import Job

KEY = {
    "format": 1,
    "card": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "driver": "580.95.05",
    "triton": "3.6.0",
    "kernels": "ab",
}
UNKEPT = {**KEY, "driver": None}  # the key of a system that does not tell its driver's version
LARGE, SMALL = Job("matmul_fp8", "tensor", 8192, 4096, 4096), Job("matmul_fp8", "row", 512, 512, 512)
WGRAD = Job("matmul_block", "block by block", 4096, 4096, 16384)
FAST, SLOW, WIDE = Config(128, 256, 128, parts=2), Config(64, 128, 128, warps=4), Config(128, 128, 128, warps=4)


class FakeCard:
    """Times that are given, or raised; a trial moves the clock by `costs` seconds, a kernel's first by `compiles` more.

    A kernel is compiled once for each operation and configuration: shapes share it.
    """

    def __init__(self, times: dict, costs: float = 0.1, compiles: float = 0.0):
        self.times, self.costs, self.compiles, self.clock, self.tried = times, costs, compiles, 100.0, []
        self.compiled: set = set()
        self.timing = 0.0  # seconds of timed launches

    def now(self) -> float:
        return self.clock

    def configs(self, job):
        return [FAST, SLOW, WIDE]

    def forget(self) -> None:
        self.tried.append("forgotten")

    def ready(self, job, config):
        self.tried.append((job, config))
        if config is not None and (job.operation, config) not in self.compiled:
            self.compiled.add((job.operation, config))
            self.clock += self.compiles
        found = self.times.get(config, 1e-3)
        if isinstance(found, Exception):
            raise found
        return lambda: found

    def time(self, call) -> float:
        self.clock += self.costs
        self.timing += self.costs
        return call()


class Model:
    """A model, or its scaling state: what trials tell apart."""


def train(trials: CardTrials, *jobs: Job, model: object = None, steps: int = 2) -> object:
    """The beginnings of a model's steps, in each of which these jobs occur; the last only begins."""
    model = model or Model()
    for step in range(steps):
        trials.step_begins(model, came=step > 0)
        for job in jobs if step < steps - 1 else ():
            trials.look(job)
    return model


def trained(card: FakeCard, *jobs: Job, key=KEY) -> CardTrials:
    """Trials after a first step in which these jobs occurred, and the beginning of a second."""
    trials = CardTrials(card, key, card.now)
    trials.model = train(trials, *jobs)  # type: ignore[attr-defined]
    return trials
