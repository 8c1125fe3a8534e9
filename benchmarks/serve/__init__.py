"""Exports read by vLLM, transformers and lm-eval: `make serve-check` runs __main__.py."""
