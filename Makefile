# `make run` and `make test` are the two main commands; each installs what it needs into .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RUNS   := $(VENV)/.runs
BENCH  := .venv-bench

# Tests start hundreds of Python processes; without compiled files each would take twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint types tests browser format bench-scheduling bench-gateway bench-placement bench-pipeline bench-ray bench-scaling bench-lab soak-simulation clean

run: $(RUNS)  ## two llama.cpp instances of a small chat model behind the gateway
	@$(BIN)/pointsman up examples/smollm2.yaml

test: $(READY) lint types tests  ## formatter, linter, strict type check and all tests

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

CORES := $(shell getconf _NPROCESSORS_ONLN)

# The cheapest first. Live tests wait for engines half of the time, so more of them run at once; a Ray cluster needs the cores.
# A test that fails beside others runs once more by itself, so that a busy machine is told from a defect; both runs are shown.
define pytest
	$(BIN)/pytest $(1) || { test $$? = 1 && echo "once more, one at a time:" && $(BIN)/pytest -n 0 $(2) --last-failed --last-failed-no-failures none; }
endef

# Pages are tested in Chromium. It is installed where that is allowed; elsewhere those tests are skipped, which -rs shows.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit; done; \
	test "$$(id -u)" = 0 && apt-get install -y -qq chromium >/dev/null 2>&1 \
	|| echo "no Chromium, and it cannot be installed here: tests of pages are skipped"

tests: $(READY) browser
	$(call pytest,-n $$(($(CORES) + 1)) -rs -m "not ray" --ignore tests/live,-m "not ray" --ignore tests/live)
	$(call pytest,-n $$((2 * $(CORES) + 1)) -rs -m "not ray" tests/live,-m "not ray" tests/live)
	$(call pytest,-rs -m ray,-m ray)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-scheduling: $(READY)  ## the scheduling table of bench/README.md
	$(BIN)/python -m bench.scheduling

bench-gateway: $(READY) $(BENCH)/.ready  ## the gateway compared with nginx, Envoy and other routers; ARGS=--quick for a short run
	$(BIN)/python -m bench.gateway --peers $(BENCH) $(ARGS)

bench-placement: $(READY)  ## time per placement, and packing on the openb data (POINTSMAN_TRACES=FOLDER); ARGS go to the packing
	$(BIN)/python -m bench.placement.speed
	$(BIN)/python -m bench.placement.openb $(ARGS)

bench-pipeline: $(READY)  ## the diamond on Ray Serve and on the local runtime; ARGS=--quick for a short run
	$(BIN)/python -m bench.pipeline $(ARGS)

bench-ray: $(READY)  ## the Ray runtime beside Ray Serve and the local runtime; ARGS=--quick for a short run
	$(BIN)/python -m bench.ray_runtime $(ARGS)

bench-scaling: $(READY)  ## scaling policies on recorded load (POINTSMAN_TRACES=FOLDER); ARGS="--plots FOLDER" writes plots
	$(BIN)/python -m bench.scaling $(ARGS)

bench-lab: $(READY)  ## simulated requests per second and core on a recording (POINTSMAN_TRACES=FOLDER)
	$(BIN)/python -m bench.lab $(ARGS)

soak-simulation: $(READY)  ## a million simulated requests with 10,000 faults; prints the seed of a run that fails
	$(BIN)/python -m bench.soak_simulation $(ARGS)

# The requirements files pin every package, dependencies included, hence --no-deps.
$(RUNS): pyproject.toml requirements/run.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pointsman needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --requirement requirements/run.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(READY): $(RUNS) requirements/dev.txt requirements/examples.txt requirements/ray.txt
	$(BIN)/pip install --quiet --no-deps --requirement requirements/ray.txt --requirement requirements/examples.txt
	touch $@

$(BENCH)/.ready: requirements/bench-gateway.txt
	$(PYTHON) -m venv $(BENCH)
	-$(BENCH)/bin/pip install --quiet --requirement requirements/bench-gateway.txt
	touch $@

clean:
	rm -rf $(VENV) $(BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis
