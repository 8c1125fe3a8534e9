"""What runs beside a training under `fe.auto`: looks at its tensors, decides, writes down why, warns."""

from fp8engine.auto.alarm import Alarm
from fp8engine.auto.controller import Controller, attach
from fp8engine.auto.log import Change, Plan, merge

__all__ = ["Alarm", "Change", "Controller", "Plan", "attach", "merge"]
