"""The report as one page: HTML with its style, its script and its numbers inside, and nothing from elsewhere."""

from fp8engine.report.page.write import page, write

__all__ = ["page", "write"]
