# `make serve` and `make test` do everything, on a machine with Python 3.11+, pip, git, a C compiler and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: serve test lint types unit slow clients clean

serve: .venv/ready
	@$(BIN)/quire serve $(ARGS)

test: lint types unit

lint: .venv/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready-test
	$(BIN)/mypy

unit: .venv/ready-test
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)

slow: .venv/ready-test
	$(BIN)/python -m pytest -m slow $(ARGS)

# Real clients have needs of their own, so they have a place of their own.
clients: .venv-clients/ready
	.venv-clients/bin/python -m pytest -m slow tests/clients $(ARGS)

# A stamp is newer than what it was made from: a second call installs nothing.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

.venv/ready-test: .venv/ready
	$(PIP) -e '.[test]'
	@touch $@

.venv-clients/ready: pyproject.toml constraints.txt tests/clients/requirements.txt
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e . -r tests/clients/requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-clients build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
