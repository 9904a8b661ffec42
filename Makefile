# make demo, make test: each sets up .venv when it is missing. On a GPU machine: make gpu, make bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
OUT ?= out

.PHONY: demo test checks lint types filecheck unit docs gpu bench fuzz parity clean

# torch by itself first: a CPU build where the index has one, and no other package may pull in a CUDA build.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m examples.demo --out $(OUT)

test: checks unit

# Of these the type checker keeps one core busy; each writes when it is done.
checks: $(READY)
	$(MAKE) --jobs=2 --output-sync=target lint types filecheck

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

filecheck: $(READY)
	$(BIN)/lit -j $(JOBS) tests/filecheck

# Each worker starts with a run of tests of its own, for those that stand together share what they compile, and takes
# from another when it is done.
unit: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q

# Pages and figures that are derived from the sources and from bench/results.
docs: $(READY)
	$(BIN)/python docs/generate.py

# With the machine's own Python, torch and triton; nearly all of the tests' time is compilation, one core each.
GPU_JOBS ?= auto
gpu:
	$(PYTHON) -m pytest -q -n $(GPU_JOBS) --dist worksteal -m gpu tests/gpu
	$(PYTHON) -m bench.attention --out $(OUT)

# What this machine can measure: the compiler and the CPU backend, then, with a GPU, kernels beside their peers.
BENCHES := compile_time cpu
ifneq ($(shell command -v nvidia-smi),)
BENCHES += attention custom decoding recurrence
endif

bench:
	for name in $(BENCHES); do $(PYTHON) -m bench.$$name --out $(OUT) || exit 1; done

# Random definitions through every path, on the CPU, then planted bugs that must die; failures print as code, the
# last line counts.
CASES ?= 2000
SEED ?= 0
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

# One list of definitions through every interpreter and backend, on the CPU; the last line counts. What was found for the
# same sources is kept in $(OUT) and not run again.
parity: $(READY)
	$(BIN)/python -m tests.parity --jobs $(JOBS) --out docs/parity.md --log $(OUT)/parity.jsonl

clean:
	rm -rf $(VENV) $(OUT) .pytest_cache .ruff_cache .hypothesis
