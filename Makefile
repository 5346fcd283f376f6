# `make help` lists the targets. Variables: PYTHON (3.10 or newer), VENV, ARGS (options for demo, doctor and pytest),
# PIP_ARGS (options for pip, such as an index), CXX.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PIP_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
NATIVE := $(shell find csrc tests/native tests/fuzz -name '*.cpp' -o -name '*.h' -o -name '*.cu' 2>/dev/null | sort)

# An install is as new as its stamp, unless the core that it built is gone.
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard csrc/*) \
  $(if $(wildcard ring_reduce/_core*.so),,rebuild)
CHECK := $(PYTHON) -c

# The package as it is installed, for mypy, which cannot be told that ring_reduce.kernels is kernels/.
TYPED := build/typed/ring_reduce

.DEFAULT_GOAL := help
.PHONY: help env install demo doctor soak fuzz test lint format clean rebuild gpu-check

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 10

demo: $(VENV)/.installed-demo  ## train with the ring, draw demo.png, write demo.json; needs only Python and g++
	$(BIN)/ring-reduce demo --plot demo.png --json demo.json $(ARGS)

doctor: $(VENV)/.installed-demo  ## say what this machine can do
	$(BIN)/ring-reduce doctor $(ARGS)

# Beside each other: most tests leave a core idle.
test: $(VENV)/.installed-dev  ## lint and every test
	@mkdir -p build
	@$(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; \
	  $(BIN)/python -m pytest $(ARGS); tests=$$?; \
	  wait $$lint; linted=$$?; cat build/lint.log; exit $$((tests || linted))

soak: $(VENV)/.installed-demo  ## random calls and faults for MINUTES (30), every result checked
	$(BIN)/ring-reduce soak --minutes $(or $(MINUTES),30) $(ARGS)

fuzz: $(VENV)/.installed-dev  ## hostile bytes for rings and their start, MINUTES (30) each; findings go to build/fuzz
	RING_REDUCE_FUZZ_MINUTES=$(or $(MINUTES),30) $(BIN)/python -m pytest --timeout=0 -s \
	  tests/test_fuzz_core.py tests/test_fuzz_bootstrap.py $(ARGS)

# With PYTHON as it is and its torch, not the environment's: machines with GPUs bring their own.
gpu-check:  ## all that only a GPU can show, in under 10 minutes; ARGS names steps
	$(PYTHON) tests/gpu/check.py $(ARGS)

# Without ruff's cache, which keys on a file alone and so misses a module that moved in or out beside it.
lint: $(VENV)/.installed-dev  ## ruff, mypy, clang-format; changes nothing
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED)
	mkdir -p $(TYPED)
	ln -s $(CURDIR)/ring_reduce/* $(CURDIR)/kernels $(CURDIR)/benchmarks $(TYPED)
	$(BIN)/mypy $(TYPED) tests
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(VENV)/.installed-dev  ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

env: $(VENV)/.installed-dev  ## the environment for development, with this package installed editable

install: env  ## the same as env

$(VENV)/.installed-demo: $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) 'setuptools>=77' pybind11
	$(PIP_INSTALL) --no-build-isolation -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) 'setuptools>=77' pybind11
	$(PIP_INSTALL) --no-build-isolation -e '.[demo,test,dev]'
	@touch $@ $(VENV)/.installed-demo

# Debian splits Python: venv and the headers are packages of their own. Asked first, since pip would fail late and at length.
$(BIN)/python:
	@$(CHECK) 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is not Python 3.10 or newer: name one with make PYTHON=..." >&2; exit 1; }
	@$(CHECK) 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments: apt-get install python3-venv" >&2; exit 1; }
	@$(CHECK) 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || { \
	  echo "Python.h of $(PYTHON) is missing: apt-get install python3-dev" >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || { \
	  echo "no C++ compiler ($${CXX:-g++}): apt-get install g++" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): some minutes the first time, torch is large."

clean:  ## remove what was built; the environment stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f ring_reduce/_core*.so ring_reduce/_cuda*.so $(VENV)/.installed-* demo.png demo.json
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
