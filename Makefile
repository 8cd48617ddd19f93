# Every target sets up what it needs from a bare Python: an environment in .venv, the install, the run.
#   make demo | test | test-triton | test-flashinfer | fuzz | lint | docs | bench | wheel | kernels-hub | hooks | clean
#   PYTHON=python3.12 make test       another interpreter; a torch that it already has is used
#   make test PYTEST_ARGS="-k cache"  a part of the tests
#   make test-triton TRITON=3.9.0     compiles every Triton kernel with another Triton, for every architecture
#   make test-flashinfer              holds the adapters to the real FlashInfer, which needs no GPU for that

PYTHON ?= python3
VENV ?= .venv
# a module's tests on one worker, which makes its fixtures once; modules in the order that tests/conftest.py gives them
PYTEST_ARGS ?= -n 2 --dist loadscope --no-loadscope-reorder
TRITON ?= 3.9.0
# FlashInfer, and of its dependencies those that importing it takes: the others are CUDA builds of torch and compilers
FLASHINFER ?= flashinfer-python==0.7.2.post1
FLASHINFER_IMPORTS := apache-tvm-ffi certifi charset-normalizer click einops idna nvidia-ml-py requests tabulate tqdm urllib3
BENCH_ARGS ?=
FUZZ_ARGS ?=

BIN := $(VENV)/bin
SETUP_INPUTS := pyproject.toml constraints.txt scripts/setup_env.py

# Two workers on two cores: more threads than cores in each only slow the other down. Inductor need not compile programs
# to learn which of the CPU's vectors work. Processes that tests start take the bytecode that the first one wrote.
TEST_ENVIRONMENT := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 TOKENIZERS_PARALLELISM=false

.PHONY: help demo test test-triton test-flashinfer fuzz lint format docs bench wheel kernels-hub hooks clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -6

# One stamp for each set of extras, in one environment. Recipes of different sets must not run at the same time.
.NOTPARALLEL:

$(VENV)/.installed-%: $(SETUP_INPUTS)
	$(PYTHON) scripts/setup_env.py --venv $(VENV) --extras $*
	@touch $@

demo: $(VENV)/.installed-models
	$(BIN)/python -m mla_ops demo

test: $(VENV)/.installed-dev
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-triton: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q --upgrade --no-deps --target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(abspath $(VENV))/triton-$(TRITON) $(TEST_ENVIRONMENT) $(BIN)/python -m pytest tests/test_aot_compile.py

test-flashinfer: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q --upgrade --no-deps --target $(VENV)/flashinfer $(FLASHINFER) $(FLASHINFER_IMPORTS)
	PYTHONPATH=$(abspath $(VENV))/flashinfer $(TEST_ENVIRONMENT) $(BIN)/python -m pytest tests/test_flashinfer_installed.py tests/test_flashinfer_dense.py tests/test_flashinfer_sparse.py

fuzz: $(VENV)/.installed-dev
	cd tests && $(TEST_ENVIRONMENT) $(abspath $(BIN))/python -m fuzz $(FUZZ_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.installed-models
	$(BIN)/python -m mla_ops bench $(BENCH_ARGS)

wheel: $(VENV)/.installed-dev
	$(BIN)/python scripts/build_wheel.py

kernels-hub: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.kernels_hub

hooks: $(VENV)/.installed-dev
	$(BIN)/python -m pre_commit install

clean:
	rm -rf $(VENV) site build dist mla_ops/kernels/*/sm_*.zip .mypy_cache .pytest_cache .ruff_cache .hypothesis
