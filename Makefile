# Everyday commands. Each sets up what it needs, once.
#
#   make serve [PORT=8000] [MODEL=path-or-name]   serve a model on 127.0.0.1 (default: the bundled one)
#   make test  [ARGS="-k scheduler"]              run the tests
#   make check                                    formatting, lint, types, floors, then the tests
#   make bench                                    run the benchmarks
#   make peers                                    install the engines that `python -m benchmarks.engine`
#                                                 compares with; one: make peers/vllm
#   make proxies                                  the same for `python -m benchmarks.gateway` (and apt's nginx)
#   make format                                   let ruff rewrite the sources
#   make clean                                    remove the environment and every cache
#
# PYTHON=...       the interpreter to build .venv from (3.11 or newer).
# TORCH_INDEX=...  extra arguments for pip. On Linux a plain `torch` brings gigabytes of CUDA libraries;
#                  on a machine without a GPU take the CPU build from the index that PyTorch's
#                  "Get started" page names:  make serve TORCH_INDEX="--extra-index-url <that index>"

PORT ?= 8000
MODEL ?=
ARGS ?=
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

BIN := .venv/bin
JS := tests/integration/js
JS_READY := $(if $(shell command -v npm),$(JS)/node_modules/.package-lock.json)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_INDEX)
# Pins the build tools as well.
export PIP_CONSTRAINT := constraints.txt

.DELETE_ON_ERROR:
.PHONY: serve test check bench peers proxies format clean

serve: .venv/.serve
	$(BIN)/argosy serve $(MODEL) --port $(PORT)

# Tests start hundreds of processes, each of which would compile what it imports again.
test: export PYTHONDONTWRITEBYTECODE :=
# In the order of their names, since the longest files (chaos) have few tests, and would come last.
test: .venv/.dev $(JS_READY)
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

check: .venv/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

bench: .venv/.dev
	$(BIN)/python -m benchmarks.record scheduler
	$(BIN)/python -m benchmarks.record startup

PEERS := .venv-peers
LLAMA_CPP := llama-cpp-python==0.3.36

peers: peers/vllm peers/openvino peers/llama-cpp
proxies: peers/sglang-router peers/litellm

peers/%: $(PEERS)/%/.ready ;

.PRECIOUS: $(PEERS)/%/.ready

$(PEERS)/%/.ready: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(PEERS)/$*
	PIP_CONSTRAINT= $(PEERS)/$*/bin/python -m pip install --quiet --no-deps $(TORCH_INDEX) -r $<
	$(if $(filter llama-cpp,$*),$(llama-server))
	$(if $(filter vllm,$*),$(allocator))
	@touch $@

# The wheel has no server: its sources do.
define llama-server
cd $(PEERS)/llama-cpp && mkdir -p src && PIP_CONSTRAINT= bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python $(LLAMA_CPP)
cd $(PEERS)/llama-cpp && tar xzf llama_cpp_python-*.tar.gz -C src --strip-components=1
cd $(PEERS)/llama-cpp && cmake -S src/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
	-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_BUILD_APP=OFF
cmake --build $(PEERS)/llama-cpp/build --target llama-server --parallel $$(nproc)
endef

# vLLM recommends tcmalloc; where apt has none it goes without and the benchmark says so.
define allocator
-cd $(PEERS)/vllm && apt-get download -qq libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb apt && \
	cp -a apt/usr/lib/*/libtcmalloc_minimal.so.4* lib/ && rm -r apt libtcmalloc-minimal4*.deb
endef

format: .venv/.dev
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

clean:
	rm -rf .venv $(PEERS) dist build $(JS)/node_modules .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	find src tests models benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing argosy with its engine into .venv ..."
	$(PIP_INSTALL) -e '.[engine]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing argosy and its development tools into .venv ..."
	$(PIP_INSTALL) -e '.[engine,postgres,redis,dev]'
	@touch .venv/.serve $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Argosy needs Python 3.11 or newer: install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make environments: install its venv module (Debian: python3-venv)" >&2; exit 1; }

$(JS)/node_modules/.package-lock.json: $(JS)/package.json $(JS)/package-lock.json $(JS)/.npmrc
	cd $(JS) && npm ci --silent
	@touch $@
