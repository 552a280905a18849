# Every target sets up $(VENV) by itself; the second time only what changed is done again.
PYTHON ?= python3
VENV ?= .venv
# Test processes; each runs on one thread.
JOBS ?= 2
PY := $(VENV)/bin/python
# NVIDIA's TensorRT-RTX and Torch-TensorRT, for test-trt-rtx alone: a folder of its own, never in $(VENV).
RTX ?= .trt-rtx
STAMP := $(VENV)/.installed
# The environment of the site and the app: their libraries alone, $(VENV)'s packages behind them.
DOCS ?= .venv-docs
# The environment of the tests for Ray and WebDataset, likewise.
RAY ?= .venv-ray
# The environment of the tests of other runtimes, likewise.
RUNTIMES ?= .venv-runtimes

# One thread a process: two pytest workers with two threads each are slower than two with one.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: named-python help demo test test-slow test-timm test-trt-rtx lint format bench eval-weights docs clean gpu site test-site test-ray test-runtimes photos

help:
	@echo "make demo          a capsule network reads real digits: predictions, heat map, ONNX file"
	@echo "make test          lint, types and the quick tests (8 minutes on 2 idle cores)"
	@echo "make test-slow     the exhaustive sweeps, then test-site, test-ray and test-runtimes"
	@echo "make test-timm     timm's own model tests, unmodified, on our models"
	@echo "make test-trt-rtx  NVIDIA's TensorRT-RTX and Torch-TensorRT convert and build every model (downloads 100 MB under NVIDIA's licence)"
	@echo "make site          the documentation site, in build/site (needs npm and Python 3.11 or newer)"
	@echo "make test-site     tests of site, notebooks and app, in Chromium (part of test-slow)"
	@echo "make test-ray      tests on a local Ray cluster (part of test-slow; downloads 200 MB)"
	@echo "make test-runtimes other runtimes: OpenVINO, Core ML, ExecuTorch, Triton, transformers; attacks by ART (part of test-slow; downloads 300 MB)"
	@echo "make lint          ruff and mypy alone"
	@echo "make bench         time and memory of each model against a CIFAR ResNet-18"
	@echo "make gpu           everything that needs a GPU, in steps that a second call goes on with (docs/dev/gpu.md)"
	@echo "make photos        heads on photographs, pretrained and from scratch: the runs that are missing (CAPSZOO_DATA)"
	@echo "make eval-weights  accuracy of the bundled weights on their test sets (CAPSZOO_DATA names the data)"
	@echo "make docs          write the generated tables and pages anew"

# A Python that is named may be another one than the environment's, which is then made anew.
VERSION := import sys; print(sys.version_info[:2])
ifeq ($(origin PYTHON),command line)
ifneq ($(shell "$(PYTHON)" -c '$(VERSION)' 2>&1),$(shell "$(PY)" -c '$(VERSION)' 2>&1))
$(STAMP): named-python
ANEW := anew
endif
endif

named-python:

$(STAMP): pyproject.toml constraints.txt scripts/setup_venv.sh
	@sh scripts/setup_venv.sh "$(PYTHON)" "$(VENV)" $(ANEW)
	@touch $@

demo: $(STAMP)
	@$(PY) scripts/demo.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist worksteal

test-slow: $(STAMP)
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist worksteal -m slow --timeout 3600
	@$(MAKE) test-site test-ray test-runtimes

$(DOCS)/.installed: scripts/setup_beside.sh $(STAMP)
	@sh scripts/setup_beside.sh "$(PY)" "$(DOCS)" site
	@touch $@

site: $(DOCS)/.installed
	PYTHONPATH="$(CURDIR)" $(DOCS)/bin/python -m scripts.site

test-site: $(DOCS)/.installed site
	PYTHONPATH="$(CURDIR)" $(TEST_ENV) $(DOCS)/bin/python -m pytest tests/app tests/site -m "slow or not slow" -n $(JOBS) --timeout 3600

$(RAY)/.installed: scripts/setup_beside.sh $(STAMP)
	@sh scripts/setup_beside.sh "$(PY)" "$(RAY)" ray
	@touch $@

test-ray: $(RAY)/.installed
	PYTHONPATH="$(CURDIR)" $(TEST_ENV) $(RAY)/bin/python -m pytest tests/test_ray_predict.py tests/data/test_shards.py \
		-m slow --timeout 3600

$(RUNTIMES)/.installed: scripts/setup_beside.sh $(STAMP)
	@sh scripts/setup_beside.sh "$(PY)" "$(RUNTIMES)" runtimes
	@touch $@

test-runtimes: $(RUNTIMES)/.installed
	PYTHONPATH="$(CURDIR)" $(TEST_ENV) $(RUNTIMES)/bin/python -m pytest tests/export/test_runtimes.py \
		tests/recipes/evaluation/test_probes.py -m slow --timeout 3600

test-timm: $(STAMP)
	$(TEST_ENV) $(PY) scripts/test_timm.py -n $(JOBS)

$(RTX)/.installed: scripts/setup_rtx.sh $(STAMP)
	@sh scripts/setup_rtx.sh "$(PY)" "$(RTX)"
	@touch $@

# ARGS narrows it down: make test-trt-rtx ARGS="-k idpa"
test-trt-rtx: $(RTX)/.installed
	$(TEST_ENV) PYTHONPATH=$(RTX) CAPSZOO_RTX_RESULTS=benchmarks/results/trt_rtx.json \
		$(PY) -m pytest tests/export -m rtx -n $(JOBS) --dist worksteal --timeout 3600 $(ARGS)

bench: $(STAMP)
	$(PY) benchmarks/models.py $(ARGS)

# ARGS="--dry-run --out /tmp/gpu" tries it on a CPU
gpu: $(STAMP)
	$(PY) benchmarks/gpu.py $(or $(ARGS),--out bench/gpu)

photos: $(STAMP)
	$(PY) benchmarks/photos.py $(ARGS)

eval-weights: $(STAMP)
	$(PY) scripts/eval_weights.py $(ARGS)

docs: $(STAMP)
	$(PY) scripts/generate.py
	$(PY) scripts/comparison.py
	$(PY) scripts/evidence.py

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .timm-tests demo
