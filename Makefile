PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow check bench clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 6; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,serve,test]'
	@touch $(READY)

demo: $(READY)  ## the whole chain on the embedded model, to a packaged release
	$(BIN)/deliver run pipelines/default.yaml

test: $(READY)  ## the fast suite, a process for each core, at most four
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n logical --maxprocesses 4 --dist worksteal

test-slow: $(READY)  ## everything else
	$(BIN)/python -m pytest -m 'slow and not gpu'

check: $(READY)  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## pytest-benchmark on this machine's CPU
	$(BIN)/python -m pytest benchmarks --benchmark-only

clean:
	rm -rf $(VENV) .deliver build dist *.egg-info
