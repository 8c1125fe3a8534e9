"""A small GPT on real text, trained under every recipe: loss, speed and memory of each precision.

>>> from fp8engine.demo.config import Config
>>> result = run(Config(size="tiny", steps=4, batch=2), "current", seed=0)
>>> len(result.curve.losses), result.validation_loss < 6
(4, True)
"""

from fp8engine.demo.config import Config, DemoError
from fp8engine.demo.precision import DEFAULT
from fp8engine.demo.report import Result
from fp8engine.demo.session import Outcome, Session, run, train
from fp8engine.demo.trainer import Keeping

__all__ = ["DEFAULT", "Config", "DemoError", "Keeping", "Outcome", "Result", "Session", "run", "train"]
