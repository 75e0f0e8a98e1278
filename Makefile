# make demo   train on real images over eight devices, and draw what happened
# make test   format, lint, types, the documentation and the test suite
# make test-all   with the slowest tests, too
# make test-guards   those of them that CI runs too: bits, layouts, resuming, recipes
# make test-short   numbers, strategies and checkpoints alone, for another Python
# make test-lowest   the same with the lowest versions that setup.cfg allows, without torch
# make lint   the first three of these
# make faults kill and harm training runs for an hour, into docs/reference/reliability.md
# make bench  how fast jaxdp is beside a loop by hand and other libraries; two hours
# make bench-gpu   the first ten minutes on a GPU, into benchmarks/results/gpu
# make bench-quick   has jaxdp become slower? Two minutes
# make dist   a wheel and an sdist in dist/, tried in an environment of their own
# make docs   the documentation as a site, in site/; broken links are errors
#
# Each first installs what it needs, once. PYTHON=python3.12 uses an environment of
# its own beside the default one: .venv-python3.12 beside .venv.

DEFAULT_PYTHON := python3.11
PYTHON ?= $(DEFAULT_PYTHON)
# How many tests run at a time: one more than most cores, since some wait.
JOBS ?= 3
# A file's tests stay in one process, which has compiled what they share.
# In the order of conftest.py, which begins with the files that take longest.
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# A test's program runs for milliseconds and takes a second to compile: a fifth of it if
# XLA leaves out what makes programs quick. The flags are those of JAX 0.10, which
# Python 3.11 has. The guards and the short suite compile as users do.
LIGHTLY = $(if $(DEFAULT),JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="$$XLA_FLAGS \
  --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
# What is installed besides what jaxdp needs: an extra of setup.cfg.
EXTRA := test
WANTED = --editable '.[$(EXTRA)]'
TORCH := torch==2.13.0
# Without what they depend on, which would bring another torch.
BESIDE_TORCH := torchvision==0.28.0 torchdata==0.11.0

DEFAULT := $(filter $(DEFAULT_PYTHON),$(notdir $(PYTHON)))
VENV := $(if $(DEFAULT),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check -qq install
PIP := $(BIN)/python $(INSTALL)
READY := $(VENV)/.ready

.PHONY: demo test test-all test-guards test-short test-lowest faults dist lint docs format bench bench-gpu bench-quick clean

demo: $(READY)
	$(BIN)/python examples/digits.py

test: lint docs
	$(LIGHTLY) $(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: lint
	$(LIGHTLY) $(BIN)/python -m pytest $(PARALLEL)

test-guards: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "bits or (slow and not kin)" \
	  tests/strategies tests/engine tests/extras/test_bitwise.py \
	  tests/extras/test_local_sgd.py tests/extras/test_pipeline.py \
	  tests/fit/test_resume.py tests/fit/test_numbers.py tests/test_docs.py \
	  tests/test_benchmarks.py::test_gpu_benchmark_runs_anywhere_at_toy_size

# First of all, every test is collected: without torch, and with another JAX.
test-short: $(READY)
	@$(BIN)/python -m pytest --collect-only -qqq > $(VENV)/collected \
	  || { cat $(VENV)/collected; exit 1; }
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/test_imports.py tests/step \
	  tests/fit/test_numbers.py tests/strategies/test_strategies.py \
	  tests/checkpoint/test_saving.py

test-lowest:
	$(MAKE) --no-print-directory VENV=.venv-lowest LOWEST=1 \
	  WANTED='-c tests/lowest.txt --editable . beartype pytest pytest-xdist' test-short

faults: $(READY)
	JAXDP_FAULTS=long JAXDP_FAULTS_TABLE=docs/reference/reliability.md \
	  $(BIN)/python -m pytest tests/faults

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(READY)
	@test -x $(BIN)/mkdocs || $(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The libraries to compare with have an environment of their own: what they bring
# along should not be what jaxdp is tested with. Lightning would import torchvision.
bench:
	@$(MAKE) --no-print-directory VENV=$(VENV)-bench EXTRA=bench BESIDE_TORCH= \
	  $(VENV)-bench/.ready
	$(VENV)-bench/bin/python -m benchmarks $(ARGS)

# With what there is: JAX for a GPU is not for this file to choose.
bench-gpu:
	python -m benchmarks.gpu --output benchmarks/results/gpu $(ARGS)

bench-quick: $(READY)
	$(BIN)/python -m benchmarks.quick $(ARGS)

# The wheel is installed without a look at this folder, and has to run README's example.
# REPOSITORY=https://github.com/OWNER/NAME is where the links of its description lead.
dist: $(READY)
	rm -rf dist build .venv-dist
	$(PIP) build twine
	mkdir -p build/source && git archive HEAD | tar -x -C build/source
	$(BIN)/python docs/readme_of_package.py build/source/README.md $(REPOSITORY)
	$(BIN)/python -m build --outdir dist build/source
	$(BIN)/python -m twine check --strict dist/*
	$(FOUND) -m venv .venv-dist
	.venv-dist/bin/python $(INSTALL) '$(TORCH)+cpu' \
	  || .venv-dist/bin/python $(INSTALL) '$(TORCH)'
	.venv-dist/bin/python $(INSTALL) dist/*.whl
	sed -n '/^```python$$/,/^```$$/{/^```/!p;}' README.md > dist/readme.py
	cd dist && ../.venv-dist/bin/python readme.py && ../.venv-dist/bin/jaxdp --help
	rm dist/readme.py

clean:
	rm -rf dist build .venv .venv-* .pytest_cache .ruff_cache jaxdp.egg-info site

# The first Python that runs. pyenv knows those that it has but that are not switched
# on; the default one may be replaced by any that is new enough, as pip finds out.
FOUND = $(shell for python in $(PYTHON) \
	  $$(pyenv whence --path $(notdir $(PYTHON)) 2>/dev/null) $(if $(DEFAULT),python3); do \
	    $$python --version >/dev/null 2>&1 && echo $$python && break; done)

# torch comes first, as a CPU build if there is one: the plain Linux package brings
# gigabytes of CUDA libraries. The default environment takes it all the same, because
# the demo reads its data with torch; another one goes without, and its tests that
# need torch skip.
TORCH_ELSE = $(if $(DEFAULT)$(filter-out Linux,$(shell uname -s)),$(PIP) '$(TORCH)',false)

# The stamp is written last, so that an interrupted installation is taken up again.
$(READY): setup.cfg pyproject.toml Makefile
	@test -n "$(FOUND)" || { echo "There is no Python 3.11 or newer that runs as" \
	  "'$(PYTHON)'; install one, or name another: make PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time"
	@rm -f $@
	$(FOUND) -m venv $(VENV)
ifndef LOWEST
	@if $(PIP) '$(TORCH)+cpu' 2>/dev/null || $(TORCH_ELSE); then \
	  for package in $(BESIDE_TORCH); do $(PIP) --no-deps $$package \
	    || echo "No $$package: the tests that need it skip."; done; \
	else echo "No $(TORCH) for $(PYTHON): the tests that need torch skip."; fi
endif
	$(PIP) $(WANTED)
	@touch $@
