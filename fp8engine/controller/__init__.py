"""What runs beside a training under `fe.auto`: looks at its tensors, decides, writes down why, warns."""

from fp8engine.controller.alarm import Alarm
from fp8engine.controller.controller import Controller, attach
from fp8engine.controller.log import Change, Plan, merge

__all__ = ["Alarm", "Change", "Controller", "Plan", "attach", "merge"]
