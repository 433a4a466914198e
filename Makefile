# The two commands: `make demo` and `make test`. Everything else is a part of them.
PYTHON ?= python3
VENV   := .venv/bin
PYTEST := $(VENV)/python -m pytest
# a file's tests stay together, with the engines and services that they share; JOBS=0: one after the other
JOBS   ?= 2
# in the order of the tree, where files with engines come before the many quick ones: these fill what is left at the end
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup verifier demo test check trial ui clean

help:            ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

setup:           ## make .venv and .venv-vllm (idempotent)
	@$(PYTHON) infra/setup.py

verifier:        ## setup, and the demo's small verifier
	@$(PYTHON) infra/setup.py --verifier

demo: verifier   ## the whole loop on this machine: capture, train, export, evaluate, register, promote
	@$(VENV)/draftsmith retrain deployments/recipes/demo.yaml

test: verifier   ## every test but the long proofs; starts what it needs
	@$(PYTEST) $(SPREAD) -m "not trial" tests

check: setup     ## no engine: ruff, mypy, imports, unit and contract tests
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(PYTEST) -q $(SPREAD) -m "not engine and not trial" tests/unit tests/contract tests/architecture

trial: verifier  ## long proofs: stories, chaos, comparison with the peer
	@$(PYTEST) -m trial tests

ui: setup        ## Prefect's and MLflow's pages on loopback, over the demo's stores
	@$(VENV)/python -m infra.ui

clean:           ## remove the environments (never the state root)
	rm -rf .venv .venv-vllm
