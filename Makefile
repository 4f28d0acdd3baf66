# Two commands on a fresh machine (Python ≥ 3.10, make, a package index):
#   make demo    a .venv, an install, and the main job: solve a table, draw it, train with it
#   make test    lint, types and all tests
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := cli fewbit_gen plots runtime tables

.PHONY: demo test lint types unit tables bench clean

demo: .venv/ready
	$(BIN)/fewbit demo

test: lint types unit

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/basedpyright --pythonpath $(BIN)/python __init__.py $(PACKAGES)

unit: .venv/ready
	$(BIN)/python -m pytest -c tests/pytest.ini tests

tables: .venv/ready
	$(BIN)/fewbit tables build
	$(BIN)/fewbit tables verify

bench: .venv/ready
	$(BIN)/fewbit bench activation

# The constraints pin the development install; what users get is in pyproject.toml.
.venv/ready: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[torch,test]"
	touch $@

clean:
	rm -rf .venv build *.egg-info demo-output
