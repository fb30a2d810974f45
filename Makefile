# Two commands for a fresh machine: `make train` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The environment is rebuilt when its requirements change; otherwise a second call skips the installation.
INSTALLED := $(VENV)/.installed
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# The size of the language model: narrow trains in a minute on a GPU, tiny on two CPU cores.
MODEL ?= $(if $(GPU),narrow,tiny)
MODELS := tiny narrow small experts
TARGETS := help train test test-full test-kernel test-bits test-triton check docs site dist hooks clean
# How many steps both runs take; without it, as many as the preset says.
STEPS ?=
# The folder of both runs; runs of an earlier `make train` there are overwritten, or continued with RESUME=yes.
RUNS ?= runs
RESUME ?=
SETTINGS := model=$(MODEL) run.overwrite=true$(if $(RESUME), run.resume=auto)$(if $(STEPS), run.steps=$(STEPS))
# train_examples.opening writes settings that suit the machine: on a CPU the number of threads, and recompute=true.
TRAIN = $(BIN)/python -m train_examples.language_model $(SETTINGS) $$(cat $(RUNS)/settings.txt)
# The arguments of this call of make, to name in the message after Ctrl-C.
GIVEN = $(foreach name,MODEL STEPS RUNS VENV,$(if $(filter-out file,$(origin $(name))),$(name)=$($(name))))
WORKERS ?= auto
NAME ?= gemm_epilogue
# The page of the repository, https://HOST/OWNER/NAME, that the links of a release lead to.
URL ?=
# The oldest and the newest supported release; the tests run on the release in constraints.txt.
TRITONS := 3.6.0 3.9.0
TRITON_FOLDERS := $(TRITONS:%=build/triton-%)
# The interpreter multiplies with NumPy's OpenBLAS. In its Haswell kernels, which AMD's processors also use, the rounding of a
# row depends on its position in a tile; in its Sandybridge and AVX-512 kernels it does not. Both run on any CPU with AVX2.
CORES ?= Haswell Sandybridge
# Without its bytecode cache, Python would compile torch and transformers anew in every process of the tests.
unexport PYTHONDONTWRITEBYTECODE
# One thread per worker, because more threads would compete for the same cores.
PYTEST := OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
PYTEST_ON_GPU := TRITON_INTERPRET=0 $(BIN)/pytest --numprocesses 8 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: $(TARGETS)

# Report wrong arguments before anything is installed. For an unknown target that is the name of a file or folder, make itself
# would only say that it is up to date.
UNKNOWN := $(filter-out $(TARGETS) $(INSTALLED) $(TRITON_FOLDERS),$(MAKECMDGOALS))
ifneq ($(UNKNOWN),)
$(error there is no target '$(firstword $(UNKNOWN))'; expected one of $(TARGETS))
endif
# $(call without,LETTERS,TEXT) is TEXT without these letters.
without = $(if $(1),$(call without,$(wordlist 2,$(words $(1)),$(1)),$(subst $(firstword $(1)),,$(2))),$(2))
ifneq ($(filter train,$(MAKECMDGOALS)),)
ifneq ($(words $(MODEL)) $(filter $(MODELS),$(MODEL)),1 $(strip $(MODEL)))
$(error MODEL is '$(MODEL)'; expected one of $(MODELS))
endif
ifneq ($(STEPS):$(call without,0 1 2 3 4 5 6 7 8 9,$(STEPS)),$(filter-out 0%,$(STEPS)):)
$(error STEPS is '$(STEPS)'; expected a whole number, 1 or more)
endif
ifeq ($(findstring :$(RESUME):,::yes:),)
$(error RESUME is '$(RESUME)'; expected yes, or nothing to start over)
endif
endif

help: ## Show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON)  the interpreter to build $(VENV) with, 3.10 or newer"
	@echo "  MODEL=$(MODEL)  the preset that 'make train' trains: one of $(MODELS)"
	@echo "  STEPS=200  how many steps 'make train' trains each model; without it, as many as the preset says"
	@echo "  RESUME=yes  'make train' continues interrupted runs, and keeps finished ones"
	@echo "  WORKERS=$(WORKERS)  how many processes 'make test' uses"
	@echo "  NAME=$(NAME)  what 'make test-kernel' tests: a file or folder of kernels/, or an operation"
	@echo
	@echo "  On Linux pip installs torch's CUDA build, of several gigabytes. For the small CPU build set"
	@echo "  PIP_EXTRA_INDEX_URL to the index of CPU wheels that torch's installation page names."

train: export RESUME_COMMAND = $(strip make train $(GIVEN) RESUME=yes)
train: $(INSTALLED) ## Train a small language model with torch.nn layers, then with fused layers, and compare
	@echo "Loading torch and timing some steps. The first time Python compiles what it imports, for half a minute ..."
	@$(BIN)/python -m train_examples.opening $(SETTINGS) run.directory=$(RUNS)
	$(TRAIN) layers=torch run.directory=$(RUNS)/torch
	$(TRAIN) layers=fused run.directory=$(RUNS)/fused
	@# At the end, the comparison prints where the metrics, the plots, the checkpoints and the samples are.
	$(BIN)/python -m train_examples.comparison $(RUNS)/torch $(RUNS)/fused --output $(RUNS)/comparison.png

test: $(INSTALLED) ## Run the tests: kernels through Triton's interpreter, and on the GPU where there is one
	$(PYTEST)
ifeq ($(GPU),yes)
	$(PYTEST_ON_GPU) tests/gpu
endif

test-full: export FUSEDLAYERS_TEST_FULL=1
test-full: export FUSEDLAYERS_COMPILE_ALL=1
test-full: test ## Run all tests, without sampling, and compile every kernel anew for every supported GPU

test-kernel: $(INSTALLED) ## Run the tests of one kernel or operation: make test-kernel NAME=gemm_epilogue
	files=$$($(BIN)/python -m tests.finding '$(NAME)') && $(PYTEST) $$files
ifeq ($(GPU),yes)
	files=$$($(BIN)/python -m tests.finding '$(NAME)' --gpu) && $(PYTEST_ON_GPU) $$files
endif

test-bits: $(CORES:%=test-bits-%) ## Run the tests that compare bits, with both kinds of kernels of NumPy's BLAS

test-bits-%: $(INSTALLED)
	OPENBLAS_CORETYPE=$* $(PYTEST) -m bits tests/functional tests/kernels

test-triton: $(TRITON_FOLDERS) ## Compile every kernel with the oldest and the newest supported Triton
	FUSEDLAYERS_TRITONS='$^' $(PYTEST) tests/kernels/test_triton_releases.py

$(TRITON_FOLDERS): build/triton-%: | $(INSTALLED)
	rm -rf $@.unfinished
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@.unfinished triton==$*
	mv $@.unfinished $@

docs: $(INSTALLED) ## Write the tables and pictures of README.md and docs/ from the committed results
	$(BIN)/python -m benchmarks.pages --write

site: $(VENV)/.site ## Build the documentation as a site in build/site, with every link checked
	$(BIN)/python -m mkdocs build

dist: $(VENV)/.release ## Build the sdist and the wheel of a release into dist/: make dist URL=https://HOST/OWNER/NAME
	rm -rf build/release dist
	$(BIN)/python -m docs.release --url '$(URL)' --output build/release
	$(BIN)/python -m build --no-isolation --outdir dist build/release
	$(BIN)/python -m twine check --strict dist/*

# These need further packages, besides those of the tests.
$(VENV)/.site: EXTRA := docs
$(VENV)/.release: EXTRA := release
$(VENV)/.site $(VENV)/.release: $(INSTALLED)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRA)]'
	@touch $@

check: $(INSTALLED) ## Lint, check the formatting, and type-check the built wheel
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build/wheel build/installed build/lib
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --target build/installed build/wheel/*.whl
	@# These are not part of the wheel, but are type-checked, too; of the tests only those that need a GPU.
	cp -r benchmarks train_examples tests build/installed/
	@# Run mypy from inside the target, so that it reads the wheel instead of the clone, where fusedlayers.kernels is elsewhere.
	cd build/installed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p fusedlayers -p benchmarks -p tests.gpu

hooks: $(INSTALLED) ## Lint and format at every commit
	$(BIN)/pre-commit install

clean: ## Remove the environment, build outputs and caches; the runs stay
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed and '$(PYTHON)' is not: name one, as in 'make PYTHON=python3.12 $(or $(MAKECMDGOALS),test)'" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# Python compiles only the modules that are imported; pip would compile all of them, in one process.
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@
