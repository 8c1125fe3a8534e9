"""Reports on converted models: what ran in which format and why, the scaling state, comparisons."""

from fp8engine.report.collect import inspect
from fp8engine.report.state import load_scaling_state_dict, scaling_state, scaling_state_dict
from fp8engine.report.table import Report

__all__ = ["Report", "inspect", "load_scaling_state_dict", "scaling_state", "scaling_state_dict"]
