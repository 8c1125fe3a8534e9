"""Runs of the demo that take less time."""

from short_runs import short as short
