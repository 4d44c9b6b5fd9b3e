# Every target makes what it needs: a virtual environment in .venv and the packages in it.
#   make demo   the first comparison, offline, on the bundled digits
#   make test   the test suite, but for tests that cross what others check one by one
#   make test-all  the whole test suite, but for what the next five are for
#   make test-gpu  the tests that make sense on one GPU, in an environment of their own in .venv-gpu
#   make test-gpu-programs  runs compiled for two GPUs, which needs none; in .venv-gpu
#   make test-torch  the tests that need PyTorch, in an environment of their own in .venv-torch
#   make test-huggingface  the tests that need Hugging Face's datasets, in .venv-huggingface
#   make test-ray  the tests that need Ray, in .venv-ray
#   make test-libraries  the code of other libraries in docs/coming-from.md, with these in .venv-libraries
#   make coverage  the tests of make test, with the lines of the package that they run
#   make lint   ruff, pyright and codespell
#   make oldest the test suite with the oldest versions that pyproject.toml allows (PYTHON=python3.11)
#   make reliability  thousands of odd inputs and hundreds of kills, see docs/reliability.md
#   make docs   the documentation, into docs/_build/html
#   make links  the external links of the documentation, which needs the network
#   make dist   the distributions of a release, in dist
#   make check-dist  these in an empty environment: metadata, installation, the demo, README's code
#   make lock   requirements.lock, the newest versions that pyproject.toml allows, which the environments below install
#   make figures  what README and documentation show of the demo, into docs/results
# PYTHON=/path/to/python3.12 chooses the interpreter; any from 3.11 on will do. LOCK= installs the newest allowed versions
# instead of those of requirements.lock.

SHELL := /bin/bash
PYTHON ?= python3 python3.13 python3.12 python3.11
BIN := .venv/bin
LOCK ?= requirements.lock
# pip installs, because it follows the mirrors that a machine is configured for; uv computes the lock.
INSTALL := -m pip install --quiet $(if $(LOCK),--constraint $(LOCK))
# Tests of numbers, on any device; those of texts, files and commands need no GPU.
GPU_TESTS := tests/algorithms tests/analysis tests/attacks tests/compression tests/contract tests/models tests/optim \
	tests/personalization tests/privacy tests/robust tests/simulation tests/wrappers tests/xla/test_grouped_conv.py

.PHONY: demo test test-all test-gpu test-gpu-programs test-torch test-huggingface test-libraries test-ray oldest reliability coverage lint lock docs links dist check-dist figures clean

demo: .venv/.user
	$(BIN)/fedrax compare examples/digits.toml

test: .venv/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow'

test-all: .venv/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile

# Several processes share the GPU, each with the memory that it needs.
test-gpu: .venv-gpu/.made
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false .venv-gpu/bin/python -m pytest -n 4 --dist loadfile \
		-m 'not slow' $(GPU_TESTS)

test-gpu-programs: .venv-gpu/.made
	JAX_PLATFORMS=cpu .venv-gpu/bin/python -m pytest tests/simulation/test_gpu_programs.py

test-torch: .venv-torch/.made
	.venv-torch/bin/python -m pytest tests/models/test_pytorch.py tests/models/test_pytorch_operators.py \
		tests/models/test_pytorch_gradients.py tests/models/test_pytorch_randomness.py \
		tests/models/test_pytorch_rejections.py tests/docs/test_examples.py

test-huggingface: .venv-huggingface/.made
	.venv-huggingface/bin/python -m pytest tests/data/test_huggingface.py

test-ray: .venv-ray/.made
	.venv-ray/bin/python -m pytest tests/cli/test_clusters.py

test-libraries: .venv-libraries/.made
	.venv-libraries/bin/python -m pytest tests/docs/test_other_libraries.py

oldest:
	$(firstword $(PYTHON)) -m venv --clear .venv-oldest
	.venv-oldest/bin/python tests/oldest.py pyproject.toml > .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip install --quiet --only-binary :all: --requirement .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip install --quiet --no-deps --editable .
	.venv-oldest/bin/python -m pytest -n auto --dist loadfile

reliability: .venv/.dev
	$(BIN)/python -m tests.fuzz configurations 2000
	$(BIN)/python -m tests.fuzz arrays 2000
	$(BIN)/python -m tests.fuzz files 1000
	$(BIN)/python -m tests.fuzz runs 500
	$(BIN)/python -m tests.kill --runs 200
	$(BIN)/python -m tests.kill --runs 100 --compare

coverage: .venv/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow' --cov=fedrax --cov-report=term

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell -D - -D docs/words.txt *.md .github benchmarks docs examples papers src

lock: .venv/.made
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra all --group dev --universal --python-version 3.11 --upgrade \
		--no-emit-index-url --no-annotate --no-header --quiet \
		--output-file requirements.lock

docs: .venv/.dev
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html

links: .venv/.dev
	$(BIN)/sphinx-build -b linkcheck -q docs docs/_build/links

dist: .venv/.made
	rm -rf dist
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

# The wheel and what it asks for, nothing else.
check-dist:
	$(firstword $(PYTHON)) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install --quiet dist/*.whl
	.venv-dist/bin/fedrax --version
	cd .venv-dist && bin/fedrax compare $(CURDIR)/examples/digits.toml --out demo
	cd .venv-dist && bin/fedrax new trial-project && bin/fedrax run trial-project/experiment.toml --out trial
	.venv-dist/bin/python -m tests.blocks README.md

figures: .venv/.user
	rm -rf runs/figures
	$(BIN)/fedrax compare examples/digits.toml --out runs/figures
	mkdir -p docs/results
	for ending in png svg; do cp runs/figures/curves.$$ending docs/results/digits.$$ending; done
	cp runs/figures/table.md docs/results/digits.md
	$(BIN)/python examples/fine_tuning.py docs/results
	$(BIN)/python examples/hospitals.py
	rm -rf runs/hospitals
	$(BIN)/fedrax partition examples/hospitals.toml --picture docs/results/hospitals-partition
	$(BIN)/fedrax compare examples/hospitals.toml --out runs/hospitals
	for ending in png svg; do cp runs/hospitals/curves.$$ending docs/results/hospitals.$$ending; done
	$(BIN)/fedrax report runs/hospitals
	@for browser in chromium chromium-browser google-chrome; do command -v $$browser > /dev/null || continue; \
	    $$browser --headless --no-sandbox --disable-gpu --hide-scrollbars --blink-settings=preferredColorScheme=1 \
	        --window-size=1180,880 --screenshot=$(CURDIR)/docs/results/report.png \
	        file://$(CURDIR)/runs/hospitals/report.html 2> /dev/null && exit 0; exit 1; \
	done; echo "no Chromium: docs/results/report.png stays as it is" >&2
	rm hospitals.csv

clean:
	rm -rf .venv .venv-oldest .venv-gpu .venv-torch .venv-huggingface .venv-libraries .venv-ray .venv-dist dist docs/_build

# A stamp is newer than pyproject.toml once everything it asks for is installed.
.venv/.user: .venv/.made pyproject.toml $(LOCK)
	$(BIN)/python $(INSTALL) --editable .
	@touch $@

.venv/.dev: .venv/.made pyproject.toml $(LOCK)
	$(BIN)/python $(INSTALL) --editable '.[all]' --group dev
	@touch $@ .venv/.user

.venv/.made:
	@for python in $(PYTHON); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "making .venv with $$($$python --version)"; \
	    $$python -m venv --clear .venv && $(BIN)/python -m pip install --quiet 'pip>=25.1' && touch $@ && exit 0; \
	    echo "$$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)" >&2; \
	    exit 1; \
	done; \
	echo "fedrax needs Python 3.11 or newer, and none of these is: $(PYTHON)." >&2; \
	echo "Say where one is: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1

.venv-gpu/.made: .venv/.made pyproject.toml
	$(BIN)/python -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet 'pip>=25.1'
	.venv-gpu/bin/python $(INSTALL) --editable '.[all,cuda]' --group test
	@touch $@

# PyTorch is large: whatever build of 2.6 or newer pip is configured for.
.venv-torch/.made: .venv/.made pyproject.toml
	$(BIN)/python -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet 'pip>=25.1'
	.venv-torch/bin/python $(INSTALL) --editable '.[all,torch]' --group test
	@touch $@

.venv-huggingface/.made: .venv/.made pyproject.toml
	$(BIN)/python -m venv .venv-huggingface
	.venv-huggingface/bin/python -m pip install --quiet 'pip>=25.1'
	.venv-huggingface/bin/python $(INSTALL) --editable '.[all,huggingface]' --group test
	@touch $@

# Beside them only what tests need: what they ask of other packages need not suit fedrax.
.venv-libraries/.made: .venv/.made
	$(BIN)/python -m venv .venv-libraries
	.venv-libraries/bin/python -m pip install --quiet fedjax 'flwr[simulation]' pfl pytest pytest-timeout torch
	@touch $@

.venv-ray/.made: .venv/.made pyproject.toml
	$(BIN)/python -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet 'pip>=25.1'
	.venv-ray/bin/python $(INSTALL) --editable '.[all,ray]' --group test
	@touch $@
