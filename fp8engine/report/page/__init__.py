"""The HTML page of a report: one file with its style, its script and its numbers, which loads nothing."""

from fp8engine.report.page.write import page, write

__all__ = ["page", "write"]
