# The two commands are `make run` and `make test`; each sets up what it needs in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test lint types tests format bench-scheduling clean

run: $(READY)  ## schedule a batch on a made-up fleet with each strategy, with the reasons
	@$(BIN)/python examples/strategies.py

test: $(READY) lint types tests  ## formatter, linter, strict types, and the whole suite

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/pytest -n auto

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-scheduling: $(READY)  ## the scheduling table of bench/README.md
	$(BIN)/python -m bench.scheduling

$(READY): pyproject.toml requirements/dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pointsman needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
