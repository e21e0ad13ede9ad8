# Every target does its own set-up, once: .venv is made again only when pyproject.toml changes.
# `make PYTHON=/path/to/python3.x ...` chooses the interpreter.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The first interpreter that runs, is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: setup demo test lint bench clean

setup: $(READY)

# The stamp comes last, so an interrupted set-up is taken up again.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv found: install one (on Debian also python3-venv), or make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if test -e /proc/driver/nvidia/version || command -v nvidia-smi >/dev/null; then \
		echo "NVIDIA driver found: PyTorch as the package index offers it"; \
	else \
		$(MAKE) --no-print-directory torch-cpu; \
	fi
	$(BIN)/python -m pip install --quiet --editable '.[demo,train,dev]'
	@touch $@

# Without a driver the CPU build is enough and spares gigabytes of CUDA libraries. Package indexes differ in where they
# keep it: under its local version, or on an index of PyTorch's own, whose address uv knows. Last, any build works.
.PHONY: torch-cpu
torch-cpu:
	@echo "No NVIDIA driver: the CPU build of PyTorch"
	@$(BIN)/python -c 'import torch' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet 'torch==2.13.0+cpu' 2>/dev/null \
		|| { $(BIN)/python -m pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu 'torch>=2.8' 2>/dev/null; } \
		|| echo "No CPU build within reach: the default build follows"

demo: $(READY)
	$(BIN)/dspark demo

# One worker a core, each with one thread: with more, PyTorch's threads would wait for each other.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
