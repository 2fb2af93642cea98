# Needs Python 3.11 or later, pip and make; everything else goes into .venv.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin

# A virtual machine can advertise AMX without allowing it; a bfloat16 product then crashes with an illegal
# instruction. oneDNN reads this limit when torch is loaded, so it must be set before Python starts.
test bench demo mutants torture theory sanitize: export ONEDNN_MAX_CPU_ISA = AVX512_CORE_BF16

# pip applies -c to what it installs but not to its isolated build environment; these two variables
# (the first for older pips, the second for newer ones) pin that as well.
PIP_INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) PIP_DISABLE_PIP_VERSION_CHECK=1 \
	$(BIN)/python -m pip install -qq -c $(CONSTRAINTS)

KERNELS := $(wildcard src/subquad/native/src/*.cpp src/subquad/native/src/*.h)

.PHONY: help demo test lint bench mutants torture docs theory wheel lock hub-kernel sanitize clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: .venv/installed ## run the whole lab in a few minutes: plan, theory, small models, HTML report
	@$(BIN)/subquad demo

# The tests are small: two at a time with one thread each take half as long as one at a time with two threads.
test: export OMP_NUM_THREADS = 1
test: .venv/installed ## run all tests, and list the ten slowest
	@$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10

lint: .venv/installed ## run ruff, mypy and clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror src/subquad/native/src/*

bench: .venv/installed-bench ## benchmark against torch and performer-pytorch, and write benchmarks/results/
	@$(BIN)/python benchmarks/attention.py

mutants: .venv/installed ## run mutation tests: count the deliberate bugs that the tests detect
	@$(BIN)/python tools/mutants.py

torture: MINUTES ?= 60
torture: SEED ?= 0
torture: .venv/installed ## run random calls, kills, damaged and hostile files for MINUTES=60 with SEED=0
	@$(BIN)/python tools/torture.py --minutes $(MINUTES) --seed $(SEED)

docs: .venv/installed ## build the documentation in site/; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in site/: open site/index.html, or with search: $(BIN)/python -m http.server -d site"

theory: .venv/installed ## write docs/theory.md from the claims, and docs/speed.svg from the results
	@$(BIN)/python tools/theory_page.py
	@$(BIN)/python tools/speed_figure.py

wheel: .venv/installed ## build a wheel with the kernels in dist/, for this and newer Linux systems
	@$(BIN)/python tools/wheel.py

hub-kernel: .venv/installed ## write dist/hub-kernel in the layout of the Hugging Face kernels package
	@$(BIN)/python tools/hub_kernel.py

lock: .venv/installed ## write requirements/ (hashes of all packages) and docs/licenses.md, from the package index
	@$(BIN)/python tools/lock.py

sanitize: .venv/installed ## run the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(BIN)/python tools/sanitize.py

clean: ## remove everything that the other targets create
	rm -rf .venv build dist site src/*.egg-info src/subquad/native/_kernels* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Subquad needs Python 3.11 or later: make PYTHON=...")'
	@$(PYTHON) -m venv .venv

# The stamp file is written only after a complete installation, so that an interrupted one is repeated.
.venv/installed: pyproject.toml $(CONSTRAINTS) setup.py $(KERNELS) | .venv/bin/python
	@echo "Installing into .venv (a minute or two the first time) ..."
	@$(PIP_INSTALL) -e '.[lab,speech,dev]'
	@touch $@

.venv/installed-bench: .venv/installed
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@
