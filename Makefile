# Everything runs from the project's own environment, which the first target that needs it builds.
#   make PYTHON=python3.12 test        another interpreter
#   make JOBS=8 test                   more test processes

PYTHON ?= python3
JOBS ?= 2
OLD := 5.16
OLD_PACKAGES := transformers==5.16.1 huggingface_hub==1.33.0

BIN := $(CURDIR)/.venv/bin
OLD_BIN := $(CURDIR)/.venv-$(OLD)/bin
PIP_INSTALL := -m pip install --disable-pip-version-check $(if $(CI),--quiet)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv demo test test-real test-old-transformers lint format ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/installed ## build .venv and install difftool into it, ready to edit

.venv/installed: pyproject.toml constraints.txt
	@$(new_environment)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,eval]'
	@touch $@

demo: .venv/installed ## convert the embedded model both ways, prove it, generate, measure
	@mkdir -p build/demo
	$(call show,convert tiny --to diffv2 --force -o tiny-diffv2)
	$(call show,inspect tiny-diffv2)
	$(call show,generate tiny-diffv2 "import os" --max-new-tokens 32)
	$(call show,convert tiny --to attnres --force -o tiny-attnres)
	$(call show,inspect tiny-attnres)
	$(call show,generate tiny-attnres "import os" --max-new-tokens 32)
	$(call show,bench tiny tiny-diffv2 --limit 8 --dtype float32)

test: .venv/installed ## the tests that need no real checkpoints
	$(BIN)/python -m pytest -m 'not real' -n $(JOBS)

test-real: .venv/installed ## fetch SmolLM2-135M into .cache (98 MB) and run the tests on real checkpoints
	$(BIN)/python scripts/fetch_smollm2.py .cache/smollm2
	$(BIN)/python -m pytest -m real

test-old-transformers: .venv-$(OLD)/installed ## the shipped modelling code on transformers 5.16.1
	$(OLD_BIN)/python -m pytest -m 'not real' -n $(JOBS) tests/test_modeling_*.py tests/test_contract.py

# The pins of constraints.txt, less those that the older transformers contradicts.
.venv-$(OLD)/installed: pyproject.toml constraints.txt
	@$(new_environment)
	grep -v -E '^(transformers|huggingface_hub)==' constraints.txt > .venv-$(OLD)/constraints.txt
	$(OLD_BIN)/python $(PIP_INSTALL) -c .venv-$(OLD)/constraints.txt $(OLD_PACKAGES) -e '.[dev]'
	@touch $@

lint: .venv/installed ## ruff and mypy, without changing anything
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict difftool

format: .venv/installed ## let ruff mend and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

ci: lint test demo test-real test-old-transformers ## all that .ci/run runs

clean: ## remove what was built and cached; environments and downloads stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache

# Prints a command as one would type it, then runs it where the demo's folders lie.
define show
@printf '\n$$ difftool %s\n' '$(1)'
@cd build/demo && $(BIN)/difftool $(1)
endef

# Makes the folder of the target that is being built an environment, if Python is recent enough.
define new_environment
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
{ echo "difftool needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }; \
echo "Building $(@D), which takes some minutes and 2 GB the first time" && $(PYTHON) -m venv $(@D)
endef
