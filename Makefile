# `make help` lists the targets. ARGS goes on to the command behind `demo`, `test` and `bench`.

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/refit-setup.stamp
PROTO_BIN := build/proto-venv/bin
# Compiling every module takes half of the time; Python compiles the ones it imports.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint proto bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv from the locked requirements

# The stamp comes last, so that a set-up that was interrupted is taken up again.
$(STAMP): requirements/cpu.txt requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo 'make: found no Python 3.11; install it or give PYTHON=/path/to/it' >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(or $(realpath .venv),.venv)
	@echo 'make: installing torch, then the locked set (a few minutes the first time)'
	@$(BIN)/python $(PIP_INSTALL) --constraint requirements/cpu.txt torch
	@$(BIN)/python $(PIP_INSTALL) --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup ## train a small model on this machine; ARGS=--fast for a tiny one
	@$(BIN)/refit demo $(ARGS)

test: setup ## run the tests; ARGS picks some, e.g. ARGS=tests/unit
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## check style, types and the gRPC contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint proto

proto: $(PROTO_BIN)/python ## generate proto/refit/v1/*_pb2* anew
	$< -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto \
		proto/refit/v1/*.proto

$(PROTO_BIN)/python: requirements/proto.txt
	@$(PYTHON) -m venv --clear build/proto-venv
	@$@ $(PIP_INSTALL) -r $<
	@touch $@

bench: setup ## run one benchmark: NAME=<name>, ARGS=--quick
	@test -n "$(NAME)" || { echo 'make: give NAME=<name>, a module of bench/' >&2; exit 1; }
	@mkdir -p build
	@$(BIN)/python -m bench.$(NAME) --json build/bench-$(NAME).json $(ARGS)

clean: ## remove .venv, build, runs, models and caches
	rm -rf .venv build runs models *.egg-info .pytest_cache .ruff_cache .mypy_cache
