# Every command of the house; `make help` lists them.  demo and test need nothing installed but Python 3.11 or newer.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
PYRIGHT := $(VENV)/bin/pyright --pythonpath $(PY)

.DEFAULT_GOAL := help
.PHONY: help demo test check static types codegen gpu bench docs clean
.NOTPARALLEL:  # two installs into one .venv would meet

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/report.stamp  ## train a small GPT under every recipe, write report/
	$(PY) -m fp8engine train

test: $(VENV)/dev.stamp  ## every test and doctest
	$(PYTEST) -n $(JOBS)

check: static  ## before a commit: format, lint, types, fast tests
	$(PYTEST) -n $(JOBS) -m "not slow"

static: $(VENV)/dev.stamp  ## format, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PYRIGHT)

types: $(VENV)/dev.stamp  ## pyright
	$(PYRIGHT)

codegen:  ## rebuild the kernels' committed configurations
	@echo "nothing to generate: no kernel configuration is committed yet ($(words $(wildcard kernels/*.py)) kernel files)"

gpu: $(VENV)/dev.stamp  ## the tests that need a CUDA device
	@if $(PY) -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; \
	then $(PYTEST) -m gpu; else echo "not measured: torch finds no CUDA device on this machine"; fi

bench: $(VENV)/dev.stamp  ## measure this CPU, side by side with torch and torchao
	$(PY) benchmarks/cpu.py

docs: $(VENV)/dev.stamp  ## run every example in docstrings, README and docs/
	$(PYTEST) fp8engine tests/test_readme.py

clean:  ## remove what make created: .venv, report, caches
	rm -rf $(VENV) report build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched only after its install succeeded, and lives in .venv: an interrupted install is taken up again,
# a removed .venv made anew, and an unchanged one costs nothing.
$(VENV)/report.stamp: EXTRA := report
$(VENV)/dev.stamp: EXTRA := dev
$(VENV)/%.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing fp8engine[$(EXTRA)] into $(VENV) (the first time takes minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRA)]'
	@touch $@
