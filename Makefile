# `make run` and `make test` are the two commands; everything they need is installed into .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint evidence crash crash-states crash-mutations crash-calls crash-stops
run: .venv/.ready
	@rm -rf build/quickstart
	@$(BIN)/streamlearn run --config configs/quickstart.yaml --stretch-by task

# Two tests at a time, each with one thread: most of them wait for a process or a broker that they started.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

# Half an hour on two cores; needs KAFKA_HOME and ../shared, and writes docs/forgetting.json.
evidence: .venv/.ready
	@$(BIN)/pytest -m evidence tests/evidence

# N kills -9 against one run that is never killed; some five seconds each. Needs KAFKA_HOME or ../shared/kafka.
N ?= 300
crash: .venv/.ready
	@$(BIN)/python -m tests.crash --kills $(N)

# Legal states after a power loss, each loaded; some ten milliseconds each.
crash-states: .venv/.ready
	@$(BIN)/python -m tests.crash --states $(N)

# The newest snapshot damaged in N ways, each to be found; some twenty milliseconds each.
crash-mutations: .venv/.ready
	@$(BIN)/python -m tests.crash --mutations $(N)

# Kills at every write, fsync, rename and the like of a save, a prune and the journal; needs strace, some minutes.
crash-calls: .venv/.ready
	@$(BIN)/python -m tests.crash --at-calls

# N SIGTERMs against one run that is left alone; as long as `crash`, and needs the same.
crash-stops: .venv/.ready
	@$(BIN)/python -m tests.crash --stops $(N)

lint: .venv/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench,codecs,dev]'
	@touch $@
