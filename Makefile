# Every command of the house; `make help` lists them.  demo and test need nothing installed but Python 3.11 or newer.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
CONSTRAINTS := constraints.txt
PY := $(VENV)/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
# Interpreting kernels and compiling them cannot share a process.
INTERPRET := TRITON_INTERPRET=1 $(PYTEST) tests/interpreted
# torch 2.11's Dynamo reads .grad of what has none, and torch warns of that.
OLDEST := -W "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
PYRIGHT := $(VENV)/bin/pyright --pythonpath $(PY)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all titan serve-check test-oldest check static types codegen codegen-all resolve nightly emulated gpu gpu-pack bench distributed mutants \
	clean browser
.NOTPARALLEL:  # two installs into one .venv would meet

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/report.stamp  ## train a small GPT under every recipe, write report/
	$(PY) -m fp8engine train --steps 160 --overwrite

test: $(VENV)/dev.stamp browser  ## a few cases of every test: each room, recipe and kernel; every doctest
	$(PYTEST) -n $(JOBS) --part short
	$(INTERPRET) -n $(JOBS) --part short

test-all: $(VENV)/dev.stamp browser  ## the other cases but those of `make nightly`; CI runs both
	$(PYTEST) -n $(JOBS) --part rest
	$(INTERPRET) -n $(JOBS) --part rest

test-oldest:  ## before a release: the same tests on the oldest torch there may be (5 GB in .venv-oldest)
	$(MAKE) test test-all VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt PYTEST_ADDOPTS='$(OLDEST)'

titan:  ## torchtitan's debug Llama in FP8 on two processes, in an environment of its own
	$(MAKE) .venv-titan/titan.stamp VENV=.venv-titan
	OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo .venv-titan/bin/python -m pytest tests/integrations

serve-check:  ## exports in vLLM, transformers and lm-eval; new weights into a running vLLM; an environment of its own (5 GB)
	@test -d .venv-serve || $(PYTHON) -m venv .venv-serve
	@test -f .venv-serve/serve.stamp || .venv-serve/bin/python benchmarks/serve/needs.py  # says what PyPI lacks, and stops
	$(MAKE) .venv-serve/serve.stamp VENV=.venv-serve CONSTRAINTS=constraints-serve.txt
	@.venv-serve/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2> /dev/null  # do not fit torch+cpu
	OMP_NUM_THREADS=1 .venv-serve/bin/python -m benchmarks.serve

check: static browser  ## before a commit: format, lint, types, fast tests
	$(PYTEST) -n $(JOBS) -m "not slow"
	$(INTERPRET) -n $(JOBS) -m "not slow"

static: $(VENV)/dev.stamp  ## format, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(MAKE) types

types: $(VENV)/dev.stamp  ## pyright; mypy of a file such as users write
	$(PYRIGHT)
	$(VENV)/bin/mypy

codegen: $(VENV)/dev.stamp  ## compile every kernel for its cards, no GPU needed; CHANGED=1: only what changed; UPDATE=1: new baseline
	$(PY) benchmarks/codegen.py --jobs $(JOBS) $(if $(CHANGED),--changed) $(if $(UPDATE),--update)

codegen-all: $(VENV)/dev.stamp  ## before a release: the same with every Triton that users get (4 GB in .tritons, 15 minutes each), then compared; ONLY=3.6.0: one
	$(PY) benchmarks/codegen_all.py --jobs $(JOBS) $(if $(ONLY),--only $(ONLY)) $(if $(CHANGED),--changed) $(if $(UPDATE),--update)

resolve: $(VENV)/dev.stamp  ## can every extra be installed, on every Python and system?  By the metadata of the package index alone
	$(PY) benchmarks/resolve.py

nightly: $(VENV)/dev.stamp  ## whole products of parameters; random programs against oracles of their own, an hour; SEEDS=... programs
	$(PYTEST) -n $(JOBS) --part nightly
	$(PYTEST) tests/nightly -n $(JOBS) --seeds $(or $(SEEDS),20000)

emulated: $(VENV)/dev.stamp  ## kernels executed from their PTX on a card made of NumPy: every case under ten seeds
	$(PYTEST) tests/emulated --whole -n $(JOBS)

gpu:  ## on a CUDA card, nothing installed but torch and Triton: check, measure beside torch and torchao (9 minutes)
	$(PYTHON) benchmarks/gpu.py

gpu-pack: $(VENV)/dev.stamp  ## compile what `make gpu` launches into .gpu-pack/, which travels with the checkout; no GPU needed
	$(PY) benchmarks/gpu.py --pack --jobs $(JOBS) --groups "$(GROUPS)"

bench: $(VENV)/dev.stamp  ## measure this CPU, side by side with torch and torchao
	$(PY) benchmarks/cpu.py

distributed: $(VENV)/dev.stamp  ## 2 and 4 processes: bytes, equality and errors of every way to divide a model
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.distributed

mutants: $(VENV)/dev.stamp  ## plant bugs in the kernels, one at a time: does a test find each?
	$(PY) -m benchmarks.mutants

docs: $(VENV)/dev.stamp  ## run every example in docstrings, README and docs/
	$(PYTEST) fp8engine tests/house/test_readme.py

clean:  ## remove what make created: .venv, report, caches
	rm -rf $(VENV) .venv-oldest .venv-titan .venv-serve .tritons .gpu-pack report build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The report's page is tested in Node (a wheel, with the extra `dev`) and in Chromium.  No wheel carries a browser that
# starts by itself, and Playwright's is downloaded at run time: so it is Debian's package.  Without, Node tests alone.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	  command -v $$name > /dev/null && exit 0; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing Debian's chromium, for the report's page" && \
	  apt-get update -qq > /dev/null && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null 2>&1; } || \
	  echo "no Chromium here: the report's page is tested in Node alone (apt-get install chromium, as root)"

# A stamp is touched only after its install succeeded, and lives in .venv: an interrupted install is taken up again,
# a removed .venv made anew, and an unchanged one costs nothing.
$(VENV)/report.stamp: EXTRA := report
$(VENV)/titan.stamp: EXTRA := titan
$(VENV)/serve.stamp: EXTRA := serve
$(VENV)/dev.stamp: EXTRA := dev
$(VENV)/%.stamp: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing fp8engine[$(EXTRA)] into $(VENV) (the first time takes minutes)"
	@$(PYTHON) -m venv $(VENV)
	@# pip's bytecode takes a third of an install, most of it for files that the demo does not import.  The tests have
	@# to have it: a warning of the compiler's, of somebody's docstring, would be an error of the test that imports it.
	@$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRA)]'
	@$(if $(filter report,$(EXTRA)),,$(PY) -W ignore -m compileall -qq -j $(JOBS) $(VENV)/lib || true)
	@touch $@
