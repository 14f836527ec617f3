# make sweep   set up, then tune the built-in tiny checkpoint on the CPU engine
# make demo-fault   plant the sqrt(2) fault in a tiny DeepSeek-V4, and see what sees it
# make test    set up, then lint, type check and test
# make audit   what is known against the installed dependencies; needs a network that reaches PyPI
# make wheel   the wheel of HEAD in dist, byte for byte the same wherever it is built
# make setup   only prepare .venv; `make` says what each target does
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup test lint sweep demo-fault audit wheel clean

help:
	@grep -E '^# make' Makefile | cut -c3-

setup: $(READY)

# pip shows its own progress. The last step removes three packages that vLLM's CPU build declares and text
# serving never uses: beside a CPU build of torch, PyPI's torchvision fails on import.
$(READY): pyproject.toml
	@echo "==> 1/4 virtual environment in $(VENV) ($(PYTHON))"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dspark-deploy needs Python 3.11 or later; try make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> 2/4 pip"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "==> 3/4 dspark-deploy with vLLM's CPU build (about 1 GB to download, 3 GB on disk)"
	@$(BIN)/python -m pip install --editable '.[cpu,report,test]' || { \
		echo "If torch ...+cpu was not found: give pip the CPU wheel index that pytorch.org documents," \
		"as PIP_EXTRA_INDEX_URL=..., and run make again." >&2; exit 1; }
	@echo "==> 4/4 removing torchvision, torchaudio and torchcodec, which break beside torch's CPU build"
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(READY)
	@echo "==> ready: $(BIN)/dspark-serve and $(BIN)/dspark-tune"

lint: $(READY)
	@echo "==> ruff"; $(BIN)/ruff check .
	@echo "==> ruff format"; $(BIN)/ruff format --check .
	@echo "==> mypy"; $(BIN)/mypy

# The engine tests wait for processes half of the time, so they run beside the others; what they print comes
# at the end. Each folder has a pytest of its own: they load vLLM for different platforms.
test: lint
	@echo "==> pytest: engine in the background, then unit, security, numerics, twins, simt, warmup, chaos"
	@log=$$(mktemp); $(BIN)/pytest tests/engine >$$log 2>&1 & engine=$$!; \
	$(BIN)/pytest -n 2 --dist loadfile tests/unit && $(BIN)/pytest -n 2 --dist loadfile tests/security && \
	$(BIN)/pytest tests/numerics && \
	$(BIN)/pytest -n 2 --dist loadfile tests/twins && $(BIN)/pytest -n 2 --dist loadfile tests/simt && \
	$(BIN)/pytest tests/warmup && $(BIN)/pytest -n 2 --dist loadfile tests/chaos; others=$$?; \
	wait $$engine; engines=$$?; echo "==> pytest: engine"; cat $$log; rm -f $$log; \
	exit $$((others != 0 || engines != 0))

# A smaller space than the profile's own, so that it ends within half an hour on two cores, finalists included.
sweep: $(READY)
	$(BIN)/dspark-tune sweep --profile cpu-tiny.yaml --num-speculative-tokens none,1,3,5,7 \
		--draft-sample-method greedy --out runs/make-sweep

# The upstream fault, planted in a tiny DeepSeek-V4: accuracy, acceptance length, and what refuses it.
demo-fault: $(READY)
	$(BIN)/python -m bench.fault

# In an environment of its own: pip-audit must change nothing of what it audits.
audit: $(READY)
	@test -x $(VENV)-audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)-audit && \
		$(VENV)-audit/bin/python -m pip install --quiet pip-audit; }
	@$(BIN)/python -m bench.audit --pip-audit $(VENV)-audit/bin/pip-audit

# From what git knows, and not from this folder, where an earlier build may lie. Modes and times are fixed.
REF ?= HEAD
DIST ?= dist
wheel: $(READY)
	@umask 022; tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && \
	git archive $(REF) | tar -x -C "$$tree" && \
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct $(REF)) $(BIN)/python -m pip wheel --quiet --no-deps \
		--no-build-isolation --wheel-dir $(DIST) "$$tree"

clean:
	rm -rf $(VENV)-audit runs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
