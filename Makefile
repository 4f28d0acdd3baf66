# Two commands on a fresh machine (Python ≥ 3.10, make, a package index):
#   make demo    a .venv, an install, and the main job: solve a table, draw it, train with it
#   make test    lint, types and the tests of every behaviour, eight minutes; `make deep` has their further cases
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := cli fewbit_gen integrations pages plots proofs runtime tables

# What lies on the path already stays there.
FEWBIT := PYTHONPATH=build/path$${PYTHONPATH:+:$$PYTHONPATH} FEWBIT_CACHE=build/cache $(PYTHON)

# Where there is a Chromium, the pages are tested in it; elsewhere these tests skip.
BROWSER := $(if $(shell command -v chromium || command -v chromium-browser || command -v google-chrome),$(shell echo ,browser))
# The stamp of the install. It has another name with a browser, so that a Chromium that comes later is tested in, too.
READY := .venv/ready$(if $(BROWSER),-browser)

FUZZ_EXAMPLES ?= 5000

# Of `make dist`: that of the development install, or a release, or the newest, or a nightly build from the index NIGHTLY.
TORCH ?=
NIGHTLY ?=
OF_RELEASE = $(if $(filter newest,$(TORCH)),--upgrade,torch==$(TORCH))
OF_NIGHTLY = --upgrade --pre --extra-index-url $(NIGHTLY)
OF_TORCH = $(if $(TORCH),$(if $(filter nightly,$(TORCH)),$(OF_NIGHTLY),$(OF_RELEASE)),--constraint .ci/constraints.txt)

.PHONY: demo test deep test-anywhere mutants lint types unit docs thorough fuzz zoo conformance held studies tables bench kernels all-kernels gpu gpu-1 gpu-2 gpu-3 gpu-4 gpu-5 gpu-6 dist clean

# Less of it: `make demo DEMO="--steps 10"`.
demo: $(READY)
	$(BIN)/fewbit demo $(DEMO)

# The three at the same time: types are checked in one process, beside which the tests would wait.
test: $(READY)
	$(MAKE) --no-print-directory --jobs=2 lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: $(READY)
	$(BIN)/basedpyright --pythonpath $(BIN)/python __init__.py $(PACKAGES)

# A process a core, and in each one thread: more only wait for one another. Bytecode is kept whatever the environment
# says, for the processes that tests start.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -c tests/pytest.ini -n auto --dist loadfile

unit: $(READY)
	$(BIN)/fewbit cache warm --all
	$(PYTEST) -m "not deep" tests

# The tests that `make test` leaves out: the further cases of its samples, and those of minutes. CI runs both.
deep: $(READY)
	$(BIN)/fewbit cache warm --all
	$(PYTEST) -m deep tests

# The documentation site, in build/site: open build/site/index.html. A broken link or reference is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The tests with ten times the examples of each property, drawn anew: an hour or two.
thorough: $(READY)
	$(BIN)/fewbit cache warm --all
	FEWBIT_EXAMPLES=400 FEWBIT_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTEST) tests

# The tests under other instructions, threads, hashes and orders, an hour or two: `make test-anywhere VARIANTS="avx2 own"
# TESTS=tests/plots` are some of it.
test-anywhere: $(READY)
	$(BIN)/fewbit cache warm --all
	VARIANTS="$(VARIANTS)" TESTS="$(TESTS)" PYTHONDONTWRITEBYTECODE= .ci/anywhere

# Whether the tests notice mistakes: about forty are made, one after the other, in a copy. `make mutants MUTANTS="plan cuh"`.
mutants: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(MUTANTS)

# Hostile inputs of every kind, many more of them than `make test` draws.
fuzz: $(READY)
	FEWBIT_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -c tests/pytest.ini tests/fuzz

# Every method on 66 small models of transformers and timm; `make zoo ZOO=--wide`: few on 155 more. Broken off, it goes on
# where it stopped: `make zoo
# ZOO="--models 'qwen*' --methods L2"` measures some, `ZOO="-o plots/results"` writes the tables kept there.
zoo: .venv/zoo-ready build/path/fewbit
	FEWBIT_CACHE=build/cache NUMBA_CACHE_DIR=build/numba PYTHONPATH=build/path:tests:tests/support:.venv/zoo $(BIN)/python -m zoo $(ZOO)

# Every differentiable operator of torch's own table by every way, beside torch. Broken off, it goes on where it stopped:
# `make conformance CONFORMANCE="--operators 'cum*' --ways 'hooks*' --fresh"` measures some, anew.
conformance: $(READY) build/path/fewbit
	NUMBA_CACHE_DIR=build/numba PYTHONPATH=build/path:tests:tests/support $(BIN)/python -W ignore -m conformance $(CONFORMANCE)

# Plans for sixty memories of twelve models, trained by, and what the steps take. Broken off, it goes on where it stopped.
held: .venv/studies-ready
	$(BIN)/python -m fewbit.plots.studies.held -o build/held.json $(HELD)

# The experiments of plots/studies: how long what is missing in plots/results takes, then all of it. Broken off, it goes
# on where it stopped: `make studies STUDIES="curves --list"`. STUDIES=--stale names files measured by other code.
studies: .venv/studies-ready
	$(BIN)/python -m fewbit.plots.studies $(STUDIES)

tables: $(READY)
	$(BIN)/fewbit tables build
	$(BIN)/fewbit tables verify

bench: $(READY)
	$(BIN)/fewbit bench activation

# Every kind of CUDA kernel compiled for sm_80, sm_90 and sm_100, without a GPU: instructions and bytes an element, and the
# share of a copy's speed that they allow; two or three minutes. Needs a venv with the extra cuda13, and cuobjdump.
kernels: build/path/fewbit
	$(FEWBIT) -m fewbit.cli.main bench instructions -o build/kernels.json

# The kernels of every activation, number of bits and dtype: registers and spills, a quarter of an hour.
all-kernels: build/path/fewbit
	$(FEWBIT) -m fewbit.cli.main bench kernels --bits 1,2,3,4,5,6,7,8 -o build/all-kernels.json

# All that only a GPU can show, in calls of at most ten minutes, which go on where they were broken off. They need no
# network and install nothing: $(PYTHON) has torch for CUDA, cuda-core with NVRTC, numba, scipy, matplotlib, click and
# rich; pytest, xdist and hypothesis for the tests; transformers for the model. Less of it:
# `make gpu-1 LIMIT=60`, `make gpu-2 LIMIT=120 SAMPLE=0.1`, `make gpu-4 LIMIT=240 LAYERS=8`: seconds, the share of the
# tests, blocks of the model. ARGS are further options of the call: `make gpu-1 ARGS="--only overhead"`.
LIMIT ?= 590
SAMPLE ?= 1
LAYERS ?= 16
ARGS ?=
TOGETHER ?= 12
TRAININGS ?= ten_million two_bits_seeds
OUT ?= plots/results
GPU = OMP_NUM_THREADS=2 $(FEWBIT) -m fewbit.plots.bench.gpu

gpu: gpu-1 gpu-2 gpu-3 gpu-4 gpu-5 gpu-6

gpu-1: build/path/fewbit
	$(GPU) checks -o $(OUT)/gpu-1.json --limit $(LIMIT) $(ARGS)

gpu-2: build/path/fewbit
	$(GPU) tests -o $(OUT)/gpu-2.json --limit $(LIMIT) --sample $(SAMPLE) $(ARGS)

gpu-3: build/path/fewbit
	$(GPU) kernels -o $(OUT)/gpu-3.json --limit $(LIMIT) $(ARGS)

gpu-4: build/path/fewbit
	$(GPU) trainings -o $(OUT)/gpu-4.json --limit $(LIMIT) --layers $(LAYERS) $(ARGS)

gpu-5: build/path/fewbit
	$(GPU) rest -o $(OUT)/gpu-5.json --limit $(LIMIT) $(ARGS)

# Trainings that would take a processor days, TOGETHER at the same time; what is missing in $(OUT) is trained.
gpu-6: build/path/fewbit
	OMP_NUM_THREADS=1 timeout $(LIMIT) env $(FEWBIT) -m fewbit.plots.studies \
		$(TRAININGS) --workers $(TOGETHER) -o $(OUT) $(ARGS)

# A release: sdist and wheel, their metadata and contents checked, and the wheel installed in an empty environment and
# tried there: on another Python by `make dist PYTHON=python3.14`, with another torch than that of the development install
# by `make dist TORCH=2.6.0`, TORCH=newest or TORCH=nightly.
dist: .venv/release-ready
	rm -rf dist build/empty
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	FEWBIT_DIST=dist $(BIN)/python -m pytest -c tests/pytest.ini tests/test_distribution.py
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet $(OF_TORCH) "$$(echo dist/*.whl)[torch]"
	cd build/empty && bin/fewbit --version && bin/fewbit solve gelu --bits 2 && bin/fewbit doctor
	cd build/empty && bin/python ../../tests/support/first_steps.py
	ls -l dist

# The package from this folder, installed or not: its root is the package `fewbit`. torch.compile finds its backend by an
# entry point, which without an install stands here.
build/path/fewbit: pyproject.toml __init__.py
	mkdir -p build/path/fewbit-0.dist-info
	printf 'Metadata-Version: 2.1\nName: fewbit\nVersion: %s\n' "$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' __init__.py)" \
		> build/path/fewbit-0.dist-info/METADATA
	sed -n '/^\[project.entry-points/,/^$$/{s/project.entry-points.//;s/"//g;p;}' pyproject.toml \
		> build/path/fewbit-0.dist-info/entry_points.txt
	ln -sfn ../.. $@

# The constraints pin the development install; what users get is in pyproject.toml.
$(READY): pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[torch,test,docs$(BROWSER)]"
	$(BIN)/fewbit cache warm
	touch $@

.venv/studies-ready: $(READY) pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[studies]"
	touch $@

.venv/release-ready: $(READY) pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[release]"
	touch $@

# In a folder of its own: where torch has no CUDA, transformers must not find this torchvision (tests/zoo/models.py).
.venv/zoo-ready: $(READY) pyproject.toml .ci/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --no-deps --upgrade --target .venv/zoo \
		timm torchvision
	touch $@

clean:
	rm -rf .venv build dist *.egg-info demo-output
