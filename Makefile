# Set-up and the usual tasks. Every target makes what it needs, from a bare machine on: Linux, CPython 3.11 with
# venv, make, and a package index that can be reached. `make help` lists the targets.

PYTHON ?= python3
ARGS   ?=

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check lint types bench clean force

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.11   the interpreter .venv is made with (now: $(PYTHON))"
	@echo "  ARGS=\"...\"          passed on by demo, test and bench, e.g. make test ARGS=\"-k doctor\""

demo: $(STAMP)  ## run examples/demo.py
	$(BIN)/python examples/demo.py $(ARGS)

# On two processes; tests that need several ranks share one of them, and its pool of ranks (tests/conftest.py).
test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

check: lint types test  ## lint, strict types and tests: what CI runs

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .

# mypy knows nothing of setuptools' package-dir, so passes/ is shown to it under its import name through a link,
# and the link's path is taken out of the messages again.
types: $(STAMP)  ## mypy --strict on dmt_compile and passes
	@mkdir -p build/types/dmt_compile && ln -sfn ../../../passes build/types/dmt_compile/passes
	@out=$$($(BIN)/mypy 2>&1); rc=$$?; \
	printf '%s\n' "$$out" | sed 's,build/types/dmt_compile/passes,passes,g'; exit $$rc

bench: $(STAMP)  ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

clean:  ## remove all that make created, .venv included
	rm -rf $(VENV) build dist dmt_compile.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds the checkout's path: an editable install points there, so a copied or moved checkout would
# otherwise run the code of the old place.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
STALE := force
endif

# No stamp means that set-up never ended, and pip takes a half-unpacked package for an installed one. So start
# from nothing then; and take the stamp away before changing anything, so that an interrupted run is seen.
$(STAMP): requirements/torch-cpu.txt requirements/cpu.txt pyproject.toml $(STALE)
	@if [ "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -m pip --version >/dev/null 2>&1; \
	then rm -f $(STAMP); echo "== updating $(VENV)"; \
	else \
	  rm -f $(STAMP); \
	  command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	    echo "error: $(PYTHON) not found. Install CPython 3.11 (Debian: apt install python3 python3-venv)" \
	         "or name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	  "$(PYTHON)" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and sys.platform == "linux" and sys.implementation.name == "cpython"))' || { \
	    echo "error: the pinned requirements are for CPython 3.11 (3.12 and 3.13 should do) on Linux;" \
	         "$(PYTHON) is $$("$(PYTHON)" -c 'import platform as p; print(p.python_implementation(), p.python_version(), "on", p.system())')." \
	         "Name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	  "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "error: $(PYTHON) has no venv module. Debian: apt install python3-venv" >&2; exit 1; }; \
	  echo "== creating $(VENV) with $$("$(PYTHON)" --version)"; \
	  "$(PYTHON)" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "== installing PyTorch for CPU (about 190 MB)"
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/torch-cpu.txt >$(VENV)/torch.log 2>&1 || { \
	  echo "== not in the configured index, asking $(TORCH_CPU_INDEX)"; \
	  $(BIN)/python -m pip install -qq --no-deps --index-url $(TORCH_CPU_INDEX) -r requirements/torch-cpu.txt; } || { \
	  echo "error: no index offers the CPU build of PyTorch. The configured one answered:" >&2; \
	  cat $(VENV)/torch.log >&2; exit 1; }
	@echo "== installing the pinned requirements"
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/cpu.txt
	@echo "== installing dmt-compile, editable"
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch, fbgemm_gpu, torchrec; print("== ready: torch", torch.__version__)'
	@echo "$(CURDIR)" >$(STAMP)
