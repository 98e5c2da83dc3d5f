SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODEL ?=
ARGS ?=

.PHONY: serve test test-all test-fast test-gpu test-fake-gpu test-chaos lint docs check links install clean

serve: $(STAMP)
	@exec $(PY) -m kvrelay.cluster.commands.cli serve $(if $(MODEL),--model $(MODEL)) $(ARGS)

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvrelay needs Python 3.11 or 3.12 (with venv) on the PATH"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "python -m venv failed: on Debian or Ubuntu, apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "installing kvrelay and its dependencies into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

links:
	@mkdir -p .imports/kvrelay && for f in kvrelay/*; do ln -sfn ../../$$f .imports/kvrelay/$$(basename $$f); done; \
	for d in kernels kvcache engine kvtransfer prefill decode router serve cluster; do ln -sfn ../../$$d .imports/kvrelay/$$d; done

lint: $(STAMP) links
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/mypy -p kvrelay

# the documentation as a site in build/site; a broken link or anchor fails
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	@$(VENV)/bin/mkdocs build --strict

check: lint
	@$(VENV)/bin/pytest -q -n 2 -m "pure and not slow" tests

ifneq ($(strip $(ARGS)),)
test: $(STAMP) links
	@$(VENV)/bin/pytest $(ARGS)
else
# Hundreds of processes import our modules: compiled once, not by each, whatever the environment says. The pure tests,
# which have no time limits of their own, take what time the others leave; those that are alone mostly wait.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP) links
	@log=$$(mktemp); status=0; \
	OMP_NUM_THREADS=1 setsid sh -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$$@"' - \
		$(VENV)/bin/pytest -n 2 --dist worksteal -m "pure and not alone" tests >$$log 2>&1 & pure=$$!; \
	trap 'kill -- -$$pure 2>/dev/null; rm -f $$log' EXIT; trap 'exit 130' INT TERM; \
	$(VENV)/bin/pytest --durations=10 -m alone tests || status=1; \
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 3 --dist loadfile --durations=10 -m "processes and not alone" tests || status=1; \
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --dist worksteal --durations=10 -m "not (pure or processes or alone)" tests || status=1; \
	wait $$pure || status=1; cat $$log; \
	exit $$status
endif

# the long random tests with all their steps, not a tenth
test-all: export KVRELAY_TEST_SCALE = 1
test-all: test

test-fast: $(STAMP)
	@$(VENV)/bin/pytest -q -n 2 -m "pure and not slow" tests

# on a machine without a registry, with what kvrelay needs on PYTHONPATH: make test-gpu GPU_PY=python3
GPU_PY ?= $(PY)
test-gpu: $(if $(filter $(PY),$(GPU_PY)),$(STAMP))
	@$(GPU_PY) -m bench.gpu.gpu $(if $(MODEL),--model $(MODEL)) $(ARGS)

# what the CUDA backend costs on the host, counted without a GPU; needs nvcc 13.0 and 7 GB
test-fake-gpu:
	@tests/fake_cuda/run.sh $(ARGS)

# a cluster whose parts are killed and damaged under load, for an hour: make test-chaos ARGS="--seconds 3600 --soak"
test-chaos: $(STAMP)
	@$(PY) -m kvrelay.cluster.commands.cli chaos $(ARGS)

clean:
	@rm -rf $(VENV) .imports build dist *.egg-info
