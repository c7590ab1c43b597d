# `make run` and `make test` are the two commands. Both install what they need into .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run demo test test-long lint alerts evidence fleet exact size page crash crash-states crash-mutations crash-calls crash-stops crash-ranks
run: .venv/.ready
	@rm -rf build/quickstart
	@$(BIN)/streamlearn run --config configs/quickstart.yaml --segment-by task

# Broker, daemon and a feed of the sample, until Ctrl-C: in containers, or else from KAFKA_HOME.
demo: .venv/.ready
	@$(BIN)/python configs/container/demo.py

# Three tests at a time with one thread each, on two cores too: many wait for a process or a broker that they started.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 3 --dist worksteal

# Further variants of the tests, some ten minutes: other presets, moments of death, dtypes.
test-long: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m long --numprocesses 3 --dist worksteal

# About half an hour on two cores. Needs KAFKA_HOME and ../shared; writes docs/evidence/measurements/forgetting_sequential.json and
# forgetting_interleaved.json beside it.
evidence: .venv/.ready
	@$(BIN)/pytest -m evidence tests/evidence

# Fires each alert by its own fault and asks the dashboard's expressions, some ten minutes. Needs KAFKA_HOME and Debian's
# prometheus; writes build/alerts.json.
alerts: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.monitoring --json build/alerts.json

# Some twenty minutes on two cores. Needs KAFKA_HOME, VLLM (the program) and BACKBONE (a folder); see docs/serving.md. Other
# options of tests.fleet go into FLEET; with --pull the servers load adapters by themselves.
fleet: .venv/.ready
	@$(BIN)/python -m tests.fleet --vllm "$(VLLM)" --backbone "$(BACKBONE)" $(FLEET) \
		--json docs/evidence/measurements/$(if $(findstring --pull,$(FLEET)),fleet_pull,fleet).json

# What other programs compute with exported regimes, beside the daemon; see docs/serving.md. An hour with SmolLM2. VLLM (the
# program) and LLAMA (a Python with xllamacpp) may be left out.
exact: .venv/.ready
	@$(BIN)/python -m tests.fleet.exact --json docs/evidence/measurements/exact.json
	@$(BIN)/python -m tests.fleet.exact --backbone "$(BACKBONE)" --answers --json docs/evidence/measurements/exact.json \
		$(if $(VLLM),--vllm "$(VLLM)") $(if $(LLAMA),--llama "$(LLAMA)")

# N kills with SIGKILL, compared with a run that is not killed. About 5 s per kill. Needs KAFKA_HOME or ../shared/kafka.
N ?= 300
crash: .venv/.ready
	@$(BIN)/python -m tests.crash --kills $(N)

# Loads N of the disk states that a power failure may leave. About 10 ms per state.
crash-states: .venv/.ready
	@$(BIN)/python -m tests.crash --states $(N)

# Damages the newest snapshot in N ways; each must be detected. About 20 ms per way.
crash-mutations: .venv/.ready
	@$(BIN)/python -m tests.crash --mutations $(N)

# Kills at every write, fsync, rename and similar call of a save, a prune and the journal. Needs strace; some minutes.
crash-calls: .venv/.ready
	@$(BIN)/python -m tests.crash --at-calls

# N kills of one of two processes that torchrun started. About 15 s per kill, with the same requirements.
crash-ranks: .venv/.ready
	@$(BIN)/python -m tests.crash --ranks $(N)

# N stops with SIGTERM, compared with an uninterrupted run. As slow as `crash`, with the same requirements.
crash-stops: .venv/.ready
	@$(BIN)/python -m tests.crash --stops $(N)

# The page in Chromium: how soon a shift is on it, and the speed of training while three browsers have it open. Some twelve
# minutes; needs Debian's chromium.
page: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.page --json docs/evidence/measurements/page.json

# Lines, files, loaded modules, tests and documentation of this checkout, or of SIZE_OF.
size: .venv/.ready
	@$(BIN)/python -m tests.size $(SIZE_OF)

lint: .venv/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "expected Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[codecs,datasets,dev,gguf,mlflow,msk,objects,otel,page,pandas,quantization,registry,tensorboard]'
	@touch $@
