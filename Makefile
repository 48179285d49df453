# Targets make .venv themselves; PYTHON=python3 on the command line uses that interpreter, with what it has installed, instead.
.PHONY: help demo test test-slow test-gpu lint format venv

ifeq ($(origin PYTHON),command line)
RUN := PYTHONPATH="$(CURDIR)" $(PYTHON)
setup = @:
else
RUN := .venv/bin/python
setup = @scripts/setup_venv.sh $(1)
endif
PYTEST := $(RUN) -m pytest

help:
	@echo "make demo       ask the model that comes along, on whatever device is there"
	@echo "make test       tests that need no GPU and no patience (2 processes, about 20 minutes on 2 cores)"
	@echo "make test-slow  the others that need no GPU"
	@echo "make test-gpu   tests that need a GPU; fails if none could run"
	@echo "make lint       ruff and pyright;  make format  lets ruff repair what it can"
	@echo "make venv       only set up .venv"
	@echo "PYTHON=python3  after any of them: use that interpreter instead of .venv"

venv:
	$(call setup,dev)

demo:
	$(call setup)
	$(RUN) scripts/demo.py

# A file's tests share compiled programs and models, so a file stays in one process.
test:
	$(call setup,dev)
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu"

test-slow:
	$(call setup,dev)
	$(PYTEST) -m "slow and not gpu"

# PYTHON may hold other versions of the libraries: their warnings are no errors here.
test-gpu:
	$(call setup,dev cuda13)
	$(PYTEST) --gpu -m gpu -W default

lint:
	$(call setup,dev)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

format:
	$(call setup,dev)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
