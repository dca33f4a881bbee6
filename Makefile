# `make demo` and `make test` work in a fresh clone: each first creates its environment, once.

PYTHON ?= python3
# More arguments for pytest: make test ARGS="-k spark -x"
ARGS ?=
# One process more than cores: tests also wait. tests/support/scheduling.py groups and orders them.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell expr $(CORES) + 1)
PYTEST = python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder

VENV := .venv
VENV35 := .venv-spark35
NEWEST := .venv-torch-newest
# The demo needs little: if .venv is not there, an environment without the tools of the tests.
DEMO := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-demo)
# So do the everyday tests, and the checks.
TESTS := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-test)
LINT := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-lint)
SPARK35 := conf/constraints-spark35.txt

# A machine without a GPU gets the CPU's torch. Evaluated when pip runs, not when make reads this.
TORCH = $$(nvidia-smi -L >/dev/null 2>&1 || echo "-c conf/constraints-cpu.txt")

.DEFAULT_GOAL := help
.PHONY: help venv venv-spark35 demo test test-all test-gpu test-spark35 test-torch-newest test-yarn test-kubernetes mutants bench bench-gpu chaos notebooks docs lint clean
.DELETE_ON_ERROR:

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

venv: $(VENV)/.installed ## Create .venv, with the package and everything that all of its tests need

venv-spark35: $(VENV35)/.installed ## Make .venv-spark35, with PySpark 3.5 and all that the tests need

demo: $(DEMO)/.installed ## Train on real digits, on this machine
	$(DEMO)/bin/distributor demo

# These options make Spark start faster. An archive that a JVM cannot use is ignored, without a word.
JAVA_OPTIONS := -XX:+UseSerialGC -XX:TieredStopAtLevel=1
CLASSES = $(VENV)/spark-classes.jsa
test test-all test-spark35 test-torch-newest test-yarn test-kubernetes mutants bench chaos notebooks: export JDK_JAVA_OPTIONS := $(JAVA_OPTIONS)
test test-all: export JDK_JAVA_OPTIONS = $(JAVA_OPTIONS) -Xlog:cds=off -Xlog:cds+dynamic=off \
	-XX:SharedArchiveFile=$(abspath $(CLASSES))

# Tests start hundreds of processes, which would each compile all sources; and users cache bytecode.
unexport PYTHONDONTWRITEBYTECODE

test: $(TESTS)/spark-classes.jsa ## Run the everyday tests: each promise once
	$(VENV)/bin/$(PYTEST) -m "not slow and not repository" $(ARGS)

test: VENV := $(TESTS)

test-all: $(CLASSES) ## Run all the tests, also those of frameworks, whole systems, and the repository
	$(VENV)/bin/$(PYTEST) $(ARGS)

test-spark35: venv-spark35 ## Run the tests, less the slow ones, on PySpark 3.5
	$(VENV35)/bin/$(PYTEST) -m "not slow and not repository" $(ARGS)

test-torch-newest: $(NEWEST)/.installed ## Run what depends on torch, on the newest one: on Linux a CUDA build of gigabytes
	$(NEWEST)/bin/$(PYTEST) -m "not slow and not spark" $(or $(ARGS),tests/compat tests/outcomes tests/node tests/rank tests/serialization tests/train tests/test_stalls.py)

test-yarn: venv ## Run the tests of YARN, on the cluster of HADOOP_CONF_DIR
	$(VENV)/bin/python -m pytest tests/managed -k "yarn or hdfs" $(ARGS)

test-kubernetes: venv ## Run the tests of Kubernetes; CONTRIBUTING.md says which variables name the cluster
	$(VENV)/bin/python -m pytest tests/managed -k kubernetes $(ARGS)

# A GPU machine often has torch, and no way to install more. PYTHON=... replaces .venv.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(wildcard $(VENV)/bin/python) ,)$(PYTHON)
test-gpu: ## Run the tests that need a GPU, and record what ran; needs no .venv
	PYTHONPATH=.:tests $(firstword $(GPU_PYTHON)) -m pytest -c tests/cuda/test-gpu.ini --rootdir=. \
		--noconftest -p no:cacheprovider -p support.cuda_results tests/cuda $(ARGS)

bench-gpu: ## Measure on a GPU; needs no .venv
	$(firstword $(GPU_PYTHON)) -m benchmarks.gpu

mutants: venv ## Put mistakes into a copy of the code, each of which a test must notice; ARGS="epochs.py 'a stall'"
	PYTHONPATH=tests $(VENV)/bin/python -m support.mutants $(ARGS)

bench: $(VENV)/.bench ## Compare speed with other launchers; ARGS=--quick for a first look
	$(VENV)/bin/python -m benchmarks $(ARGS)

chaos: venv ## Inject every fault and print the results; ARGS="--times 1" for a first look
	PYTHONPATH=tests $(VENV)/bin/python -m support.chaos $(ARGS)
	RECOVERY_TIMES=$(or $(RECOVERY_TIMES),200) $(VENV)/bin/python -m pytest -m slow tests/test_recovery.py

notebooks: venv ## Run the notebooks, on a cluster if they need one, and save their outputs
	PYTHONPATH=tests $(VENV)/bin/python -m support.notebooks $(ARGS)

# From scratch: Sphinx forgets the index entries of pages that have not changed, which the search uses.
docs: $(VENV)/.docs ## Build the documentation into docs/_build/html; warnings are errors
	$(VENV)/bin/python -m sphinx -q -W -E --keep-going -b html docs docs/_build/html

lint: $(LINT)/.installed ## Check style, format, types, vocabulary, totals and spelling
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tests/support/typed_program.py
	$(VENV)/bin/python tests/support/vocabulary.py
	$(VENV)/bin/python tests/support/budget.py
	$(VENV)/bin/codespell

lint: VENV := $(LINT)

clean: ## Remove files that builds, tests and runs leave behind, except the environments
	rm -rf docs/_build docs/tutorials/notebooks build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	rm -rf artifacts derby.log metastore_db spark-warehouse mlflow.db mlartifacts mlruns lightning_logs
	find . -name '.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

# pip would compile all of it, which takes longer than to install it. Little of it is imported.
$(VENV)/.installed: setup.cfg setup.py conf/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --no-compile $(TORCH) -e '.[dev]'
	touch $@

.venv-demo/.installed: setup.cfg setup.py conf/constraints-cpu.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install -q --no-compile $(TORCH) -e '.[spark]' scikit-learn
	touch $@

.venv-lint/.installed: setup.cfg setup.py conf/constraints-cpu.txt
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/python -m pip install -q --no-compile $(TORCH) -e '.[lint]'
	touch $@

.venv-test/.installed: setup.cfg setup.py conf/constraints-cpu.txt
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install -q --no-compile $(TORCH) -e '.[test]'
	touch $@

# Without the options of `make test`, which names this file.
%/spark-classes.jsa: %/.installed
	JDK_JAVA_OPTIONS="$(JAVA_OPTIONS)" PYTHONPATH=tests $*/bin/python -m support.spark_classes $@

$(VENV)/.docs: $(VENV)/.installed
	$(VENV)/bin/python -m pip install -q --no-compile $(TORCH) -e '.[docs]'
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(VENV)/bin/python -m pip install -q $(TORCH) -e '.[bench]'
	touch $@

$(VENV35)/.installed: setup.cfg setup.py conf/constraints-cpu.txt $(SPARK35)
	$(PYTHON) -m venv $(VENV35)
	$(VENV35)/bin/python -m pip install -q --no-compile $(TORCH) -c $(SPARK35) -e '.[test]'
	touch $@

# The newest that pip finds; PIP_CONFIG_FILE=/dev/null if this machine's pip is configured otherwise.
$(NEWEST)/.installed: setup.cfg setup.py
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q --upgrade torch -e '.[test]'
	touch $@
