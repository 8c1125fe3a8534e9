"""Machine code of every kernel, compiled without a card and judged: what `make codegen` runs."""
