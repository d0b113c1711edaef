# `make demo` and `make test` set themselves up in .venv; after the first time nothing needs the network.
# ARGS reaches the command: make test ARGS="-k ring", make demo ARGS=--quick

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-torch slow search realtime lint types bench figures docs lock clean moved
MAKEFLAGS += --no-print-directory
SHELL := /bin/sh

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
TORCH_VENV := .venv-torch
TORCH_STAMP := $(TORCH_VENV)/ready
TORCH_PIP := $(TORCH_VENV)/bin/python -m pip -qq --disable-pip-version-check
# A wheel without CUDA, if pip finds it; else the newest, without CUDA where torch's own index is in reach.
TORCH := torch==2.13.0+cpu
EXTRAS := mpi,fast,viz,ucx,nvrtc,metrics,arrow,dev
export PIP_ROOT_USER_ACTION := ignore

# An environment knows its own path: one that was copied, moved or lost its interpreter is made again.
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell $(BIN)/python -c 'print(open("$(STAMP)").read())' 2>/dev/null),$(CURDIR))
$(STAMP): moved
endif
endif
ifneq ($(wildcard $(TORCH_STAMP)),)
ifneq ($(shell $(TORCH_VENV)/bin/python -c 'print(open("$(TORCH_STAMP)").read())' 2>/dev/null),$(CURDIR))
$(TORCH_STAMP): moved
endif
endif

# Prints the first interpreter that will do; otherwise says in one line what to install, and fails.
define FIND_PYTHON
found=; for each in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	found=$$each; \
	$$each -c 'import ensurepip, venv' 2>/dev/null && break; \
	found="$$each without venv"; \
done; \
case "$$found" in \
	"") echo "optcc needs Python 3.11 or newer: none found (name one: make PYTHON=/path/to/python3)" >&2; exit 1;; \
	*" without venv") echo "$${found% without venv} cannot make virtual environments: apt install python3-venv" >&2; exit 1;; \
esac
endef

help:
	@echo 'make demo     one server lost half of its bandwidth: verify, run and compare every schedule'
	@echo 'make test     the tests (ARGS="-k ring", ARGS=--run-slow)'
	@echo 'make test-torch  the tests of the torch.distributed backend, with torch in .venv-torch'
	@echo 'make slow     the long studies that need no real time, on all cores (ARGS="-k pods")'
	@echo 'make search   those that go through thousands of seeds or mutants'
	@echo 'make realtime those that wait for real time or measure it: on a quiet machine'
	@echo 'make bench    ours and peers on emulated hosts, interleaved: a record (ARGS=--quick)'
	@echo 'make figures  every figure and number, from records'
	@echo 'make docs     the manual, in docs/_build'
	@echo 'make lint     style, import rules and floors'
	@echo 'make types    mypy, strict'
	@echo 'make setup    only the virtual environment, in .venv'
	@echo 'make lock     pin the newest dependencies in requirements.lock'
	@echo 'make clean    remove .venv and everything built'

setup: $(STAMP)
	@:

$(STAMP): requirements.lock pyproject.toml
	@$(FIND_PYTHON); \
	if [ -e $(STAMP) ] && [ "$$($(BIN)/python -c 'print(open("$(STAMP)").read())' 2>/dev/null)" = '$(CURDIR)' ]; \
	then rm $(STAMP); else \
		echo "Setting up $(VENV) with $$($$found --version) (once, about a minute)"; \
		$$found -m venv --clear $(VENV) || exit 1; \
	fi; \
	$(PIP) install -r requirements.lock && \
	$(PIP) install --no-deps --no-build-isolation -e . && \
	printf %s '$(CURDIR)' > $(STAMP)

demo: $(STAMP)
	@$(BIN)/optcc demo $(ARGS)

bench: $(STAMP)
	@$(BIN)/optcc experiment peers-on-fabric $(ARGS)

figures: $(STAMP)
	@$(BIN)/optcc figures $(ARGS)

# A group of tests that measure time or use the host's network runs in one of the processes.
test: $(STAMP)
	@$(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder $(ARGS)

# torch has an environment of its own: from the index it brings CUDA along, which is twenty times the rest.
test-torch: $(TORCH_STAMP)
	@$(TORCH_VENV)/bin/pytest tests/torch $(ARGS)

$(TORCH_STAMP): requirements.lock pyproject.toml
	@$(FIND_PYTHON); \
	echo "Setting up $(TORCH_VENV) with $$($$found --version) and torch (once)"; \
	$$found -m venv --clear $(TORCH_VENV) && \
	$(TORCH_PIP) install -c requirements.lock wheel setuptools && \
	{ $(TORCH_PIP) install $(TORCH) 2>/dev/null || \
		$(TORCH_PIP) install --extra-index-url https://download.pytorch.org/whl/cpu 'torch>=2.4'; } && \
	$(TORCH_PIP) install -c requirements.lock --no-build-isolation -e '.[fast]' pytest hypothesis expecttest && \
	printf %s '$(CURDIR)' > $(TORCH_STAMP)

slow: $(STAMP)
	@$(BIN)/pytest -n auto --dist worksteal -m 'slow and not realtime and not search' $(ARGS)

search: $(STAMP)
	@$(BIN)/pytest -n auto --dist worksteal -m 'slow and search' $(ARGS)

realtime: $(STAMP)
	@$(BIN)/pytest -m 'slow and realtime' $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --check --quiet || { echo 'not formatted: $(BIN)/ruff format' >&2; exit 1; }
	@said=$$($(BIN)/lint-imports --no-cache) || { printf '%s\n' "$$said" >&2; exit 1; }

types: $(STAMP)
	@$(BIN)/mypy $(ARGS)

docs: $(STAMP)
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo docs/_build/index.html

# The newest of everything that pyproject.toml allows and that the oldest supported Python takes.
lock: $(STAMP)
	@set -e; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	$(BIN)/python -c "$$WANTED" > "$$work/wanted"; \
	$(PIP) install --dry-run --ignore-installed --target "$$work/none" --python-version 3.11.0 --only-binary :all: \
		--report "$$work/report" -r "$$work/wanted"; \
	{ \
		echo '# Every dependency of .[$(EXTRAS)], exactly; wheel and setuptools build optcc itself.'; \
		echo '# Refresh with: make lock'; \
		$(BIN)/python -c "$$PINNED" "$$work/report"; \
	} > "$$work/lock"; \
	cp "$$work/lock" requirements.lock; \
	echo "requirements.lock: $$(grep -c == requirements.lock) packages"

define WANTED
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
print(*project["build-system"]["requires"], *project["project"]["dependencies"], sep="\n")
print(*(each for name in "$(EXTRAS)".split(",") for each in extras[name]), sep="\n")
endef

define PINNED
import json, sys
found = [each["metadata"] for each in json.load(open(sys.argv[1]))["install"]]
print(*sorted((each["name"] + "==" + each["version"] for each in found), key=str.casefold), sep="\n")
endef
export WANTED PINNED

clean:
	@rm -rf $(VENV) $(TORCH_VENV) build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis \
		.coverage htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
