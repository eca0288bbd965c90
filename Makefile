# make demo    install, train and score the demo, show translations
# make test    install, run the tests but whole runs and slow ones
# make runs    the tests that train whole runs or start whole programs
# make experiments-test  the programs of experiments/, small, and their tables from their records
# make libtpu  fetch the compiler for TPUs, which `ahead` needs
# make ahead   install libtpu, run the tests that compile for TPUs that are not here
# make peers   install transformers and torch, run the tests that compare with them
# make package build sdist and wheel in dist/, and use them in an empty environment
# make site    build the pages of docs/ into site/, strictly: a link that leads nowhere is an error
# make images  run the steps of the Dockerfiles without Docker
# make matrix  the tests of attention and models on the oldest and newest Python and JAX
# make slow    the tests that take minutes, and all combinations of parameters
# make mutants puts bugs in, and says which ones no test sees; takes long
# make lint    ruff and pyright
# make clean   remove .venv, dist, site and the demo's runs
#
# PYTHON=python3.12 picks the interpreter; it must be 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin
# What the demo needs, and all the rest.
DEMO_INSTALLED := .venv/installed-demo
INSTALLED := .venv/installed

# DEMO_STEPS=200 trains a shorter demo, in a directory of its own.
DEMO_STEPS ?=
RUN := runs/demo$(addprefix -,$(DEMO_STEPS))
# What the demo must reach: BLEU, and the percentage of exact matches.
DEMO_BLEU ?= 85
DEMO_EXACT ?= 75

.PHONY: demo test runs experiments-test ahead libtpu peers site package images matrix slow mutants lint clean
.DELETE_ON_ERROR:

demo: $(DEMO_INSTALLED)
	$(BIN)/python train.py configs/demo.py --workdir $(RUN) $(addprefix --train.num_steps ,$(DEMO_STEPS))
	$(BIN)/python eval.py $(RUN)
	@echo "about twenty-five to nine in the evening" | $(BIN)/python eval.py $(RUN) --translate
	@$(BIN)/python -c 'import json; r = json.load(open("$(RUN)/eval_test.json")); \
	    exit(r["bleu"] < $(DEMO_BLEU) or r["exact_match"] < $(DEMO_EXACT))' || \
	    { echo "error: the demo must reach $(DEMO_BLEU) BLEU and $(DEMO_EXACT) % exact match" >&2; exit 1; }

FAST := not slow and not rest

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m '$(FAST) and not whole_run'

# The files that name a mark: to collect all others takes a minute.
NAMING = $$(grep -rl --include='test_*.py' $(1) tests experiments)

runs: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m '$(FAST) and whole_run' $(call NAMING,whole_run)

experiments-test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m '$(FAST)' experiments

# In a place of its own: where libtpu is installed, each use of JAX looks for a TPU first.
LIBTPU := .venv/libtpu

ahead: $(LIBTPU)/libtpu/libtpu.so
	PYTHONPATH=$(CURDIR)/$(LIBTPU) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 -m 'libtpu and $(FAST)' \
	    $(call NAMING,libtpu)

libtpu: $(LIBTPU)/libtpu/libtpu.so

$(LIBTPU)/libtpu/libtpu.so: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(LIBTPU) libtpu -c constraints.txt

peers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[huggingface]' -c constraints.txt
	$(BIN)/python -m pytest -n 2 -m 'peers and $(FAST)' $(call NAMING,peers)

# Not --quiet: MkDocs counts only the warnings that it shows.
site: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(INSTALLED)
	tests/package.sh $(CURDIR)/$(BIN)/python $(CURDIR)/dist

# Takes gigabytes for that of a GPU: IMAGES=docker/tpu.Dockerfile runs one.
IMAGES ?= docker/tpu.Dockerfile docker/gpu.Dockerfile

images:
	tests/images.sh $(PYTHON) $(addprefix $(CURDIR)/,$(IMAGES))

# Python and JAX, the oldest and the newest that pyproject.toml allows.
MATRIX ?= python3.11,jax==0.10.2 python3.12,jax python3.13,jax
matrix:
	for pair in $(MATRIX); do \
	    python=$${pair%%,*} jax=$${pair#*,} place=.venv/matrix/$${pair%%,*}-$${pair#*,}; \
	    $$python -m venv $$place && \
	    $$place/bin/python -m pip install --quiet -e '.[dev,export]' "$$jax" && \
	    $$place/bin/python -m pytest -n 2 -q tests/attention tests/model -m '$(FAST)' || exit 1; \
	done

slow: $(LIBTPU)/libtpu/libtpu.so
	$(BIN)/python -m pytest -n 2 --dist loadfile --timeout 3600 -m '(slow or rest) and not libtpu' tests mhe_jax experiments
	PYTHONPATH=$(CURDIR)/$(LIBTPU) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --timeout 3600 \
	    -m '(slow or rest) and libtpu' $(call NAMING,libtpu)

mutants: $(INSTALLED)
	$(BIN)/python tests/mutants.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv dist site runs/demo runs/demo-*

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: mhe_jax needs Python 3.11 or newer, and $(PYTHON) is not:" \
	        "$$($(PYTHON) --version 2>&1); try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	    exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -e . -c constraints.txt
	@touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[report,wandb,cloud,dev,export]' -c constraints.txt
	@touch $@
