# `make serve` and `make test` do everything, on a machine with Python 3.11+, pip, git, a C compiler and make.
PYTHON ?= python3
BIN := .venv/bin
# Workers of pytest: one more than cores, at most 8, because some tests wait for processes to time out.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); n=$$((n + 1)); [ $$n -le 8 ] || n=8; echo $$n)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: serve test lint types unit slow races mutants siege clients docs dist sbom clean

serve: .venv/ready
	@$(BIN)/quire serve $(ARGS)

# mypy has one thread: pytest uses the other cores meanwhile.
test: lint
	@$(MAKE) --no-print-directory -j 2 types unit

lint: .venv/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready-test
	$(BIN)/mypy

unit: .venv/ready-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(ARGS)

slow: .venv/ready-test
	$(BIN)/python -m pytest -m slow $(ARGS)

# The tests that start threads, processes or servers, with random delays in them: tests/races/sitecustomize.py.
SEED ?= 1
races: .venv/ready-test
	QUIRE_RACES=$(SEED) PYTHONPATH=tests/races $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  -m "not slow and not gpu" --ignore-glob='tests/kernels/*' --ignore-glob='tests/models/*' $(ARGS)

# Whether the tests fail on sources with a mistake in them, for each mistake of tests/mutants/mutants.toml.
mutants: .venv/ready-test
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Three good clients beside a hostile one, for ten minutes: tests/siege/run.py.
siege: .venv/ready-test
	$(BIN)/python tests/siege/run.py $(ARGS)

# The pages of docs/ as a site, in build/site.
docs: .venv-docs/ready
	.venv-docs/bin/mkdocs build --strict

# A wheel and an archive of the sources, in dist/.
dist: .venv/ready
	$(BIN)/python -m pip --disable-pip-version-check install -q build
	rm -rf dist && $(BIN)/python -m build

# What a serving environment is made of, as CycloneDX, in dist/sbom.json.
sbom: .venv/ready
	$(BIN)/python deploy/sbom.py dist/sbom.json

.venv-docs/ready: mkdocs.yml
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27,<2'
	@touch $@

# Real clients have needs of their own, so they have a place of their own.
clients: .venv-clients/ready
	.venv-clients/bin/python -m pytest -m slow tests/clients $(ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv

# A stamp is newer than what it was made from: a second call installs nothing.
.venv/ready: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e .
	@touch $@

# The test environment serves, too, so that its stamp is both.
.venv/ready-test: pyproject.toml constraints.txt constraints-test.txt | .venv/bin/python
	$(PIP) -c constraints-test.txt -e '.[test]'
	@touch .venv/ready $@

.venv-clients/ready: pyproject.toml constraints.txt tests/clients/requirements.txt
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e . -r tests/clients/requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-clients .venv-docs build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
