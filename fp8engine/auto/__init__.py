"""Automatic choice of formats (`fe.auto`): tensors are sampled, casts decided and logged, outliers reported."""

from fp8engine.auto.alarm import Alarm
from fp8engine.auto.attach import attach
from fp8engine.auto.controller import Controller
from fp8engine.auto.log import Change, Plan, merge

__all__ = ["Alarm", "Change", "Controller", "Plan", "attach", "merge"]
