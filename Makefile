# Needs Python 3.11 or later, pip and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

# A virtual machine can advertise AMX and not allow it; a bfloat16 product then dies with an illegal
# instruction. oneDNN reads this limit when torch is loaded, so it must be set before Python starts.
test bench demo mutants sanitize: export ONEDNN_MAX_CPU_ISA = AVX512_CORE_BF16

# pip applies -c to what it installs but not to its isolated build environment; these two variables
# (the first for older pips, the second for newer ones) pin that as well.
PIP_INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	$(BIN)/python -m pip install -qq -c constraints.txt

KERNELS := $(wildcard src/subquad/native/src/*.cpp src/subquad/native/src/*.h)

.PHONY: help demo test lint bench mutants docs wheel hub-kernel sanitize clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: .venv/installed ## run the whole lab in a few minutes: a plan, the theory, four small models, a report
	@$(BIN)/subquad demo

# Tests are small: two at a time with one thread each take half as long as one at a time with two threads.
test: export OMP_NUM_THREADS = 1
test: .venv/installed ## run every test, and list the ten slowest
	@$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10

lint: .venv/installed ## ruff, mypy and clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror src/subquad/native/src/*

bench: .venv/installed-bench ## measure against torch and performer-pytorch, write benchmarks/results/
	@$(BIN)/python benchmarks/attention.py

mutants: .venv/installed ## break the library on purpose and count the breaks that the tests notice
	@$(BIN)/python tools/mutants.py

docs: .venv/installed ## write docs/theory.md from the claims of `subquad verify`
	@$(BIN)/python tools/theory_page.py

wheel: .venv/installed ## build dist/subquad-*.whl, with the kernels, for Linux systems as new as this
	@$(BIN)/python tools/wheel.py

hub-kernel: .venv/installed ## write dist/hub-kernel, which the Hugging Face kernels package loads
	@$(BIN)/python tools/hub_kernel.py

sanitize: .venv/installed ## run the tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(BIN)/python tools/sanitize.py

clean: ## remove what the other targets made
	rm -rf .venv build dist src/*.egg-info src/subquad/native/_kernels* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Subquad needs Python 3.11 or later: make PYTHON=...")'
	@$(PYTHON) -m venv .venv

# A stamp is written only after a whole installation, so that an interrupted one is done again.
.venv/installed: pyproject.toml constraints.txt setup.py $(KERNELS) | .venv/bin/python
	@echo "Installing into .venv (a minute or two the first time) ..."
	@$(PIP_INSTALL) -e '.[lab,speech,dev]'
	@touch $@

.venv/installed-bench: .venv/installed
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@
