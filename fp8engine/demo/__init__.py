"""A small GPT on real text, trained under every recipe: what each precision cost, and what it gained.

>>> from fp8engine.demo.config import Config
>>> from fp8engine.demo.train import run
>>> result = run(Config(size="tiny", steps=4, batch=2), "current", seed=0)
>>> len(result.curve.losses), result.validation_loss < 6
(4, True)
"""

from fp8engine.demo.config import Config, DemoError
from fp8engine.demo.precision import DEFAULT
from fp8engine.demo.session import Outcome, Session, train
from fp8engine.demo.train import Keeping, Result, run

__all__ = ["DEFAULT", "Config", "DemoError", "Keeping", "Outcome", "Result", "Session", "run", "train"]
