# Hansa: set-up, demonstration and checks. `make help` lists the targets.

PYTHON      ?= python3
# More workers than cores: many tests wait for processes and deadlines.
PYTEST_ARGS ?= -n 4 --dist loadfile
# Tests start many processes, which would compile Hansa anew each time.
unexport PYTHONDONTWRITEBYTECODE
DEMO_ARGS   ?=
LOCK_ARGS   ?=
BENCH_ARGS  ?=
BUDGET      ?=
KILLS       ?= 100
SEED        ?= 0
FUZZ_MINUTES ?= 30
JOBS        ?= 2
AUDIT       ?=
CAMPAIGNS   ?= fuzz chaos interference:MINUTES=10 $(shell sed -nE 's/^(dst|day|power|weather):.*/\1/p' Makefile)
MINUTES     ?= 5
SEEDS       ?= 1000
RELEASE_SEEDS ?= 100000
PARTIES     ?= 10000
MODULE      ?=
SAMPLE      ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check -qq
# The stamps are written last, so an interrupted installation starts again from an empty environment.
DEPS  := $(VENV)/.deps-installed
READY := $(VENV)/.ready
EXTRAS := $(VENV)/.extras-installed
# Each peer of the benchmarks has its own environment, because their requirements conflict.
PEERS := flower pfl fedjax $(if $(findstring --nvflare,$(BENCH_ARGS)),nvflare)
ENVS  := benchmarks/.envs
# The release tools have their own environment.
RELEASE := .venv-release
TOOLS   := $(RELEASE)/.ready

check-python = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
  { echo "Hansa needs Python 3.11 or newer; '$(PYTHON)' is missing or older. Name an interpreter with 'make PYTHON=...'." >&2; exit 1; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup extras hooks surface docs demo demo-net test test-rest test-budget test-products test-night test-gpu lint chaos power weather dst day load fuzz interference mutants audit release \
  bench bench-check bench-peers \
  bench-fusion bench-deploy bench-secure bench-dp bench-paillier bench-psi privacy-figures lock clean

help:
	@echo "make demo    set up .venv and run the demonstration (arguments: DEMO_ARGS=...)"
	@echo "make demo-net  set up .venv and run a federation of five processes over mutual TLS on this machine"
	@echo "make test    set up .venv and run ruff, mypy and pytest without the slow tests (PYTEST_ARGS=... replaces '$(PYTEST_ARGS)')"
	@echo "make test-rest  run the tests that make test left out or skipped: slow ones, and those that need extras"
	@echo "make test-budget  compare the processor time of make test and make test-rest with tests/budget.json (BUDGET=--record: record it)"
	@echo "make test-night  run all tests with all products of parameters and coverage, then CAMPAIGNS='$(CAMPAIGNS)'; print one table"
	@echo "make test-gpu  set up .venv and run the tests that need an NVIDIA GPU"
	@echo "make lint    set up .venv and run ruff and mypy only"
	@echo "make chaos   kill the aggregator and parties at random moments and check the results (KILLS=$(KILLS) SEED=$(SEED))"
	@echo "make fuzz    fuzz every parser of untrusted bytes, the HTTP routes and a party's worker (FUZZ_MINUTES=$(FUZZ_MINUTES) of CPU time, JOBS=$(JOBS) in parallel)"
	@echo "make interference  send requests of liars to twins of a party whose samples differ in one record, and compare what leaves them (MINUTES=$(MINUTES) SEED=$(SEED))"
	@echo "make mutants MODULE=src/hansa/fusion  change formulas of a file or package one at a time; print changes that no test notices (SAMPLE=80 SEED=$(SEED): a sample, JOBS=$(JOBS) in parallel)"
	@echo "make audit   check the locked requirements for known vulnerabilities (AUDIT=skip: skip the check)"
	@echo "make release  write sdist, wheel, audit and bill of materials to dist/, then run make test-night (dst: SEEDS=$(RELEASE_SEEDS))"
	@echo "make weather  run rounds over connections with delays, losses, resets, stalls and outages (MINUTES=$(MINUTES) SEED=$(SEED))"
	@echo "make power   simulate power failures of disks at random moments and check acknowledged writes (SEEDS=$(SEEDS) histories)"
	@echo "make load    connect many parties to one aggregator; measure memory, idle CPU, rounds, a restart (PARTIES=$(PARTIES) BENCH_ARGS=...)"
	@echo "make dst     simulate federations under faults, one per seed (SEEDS=$(SEEDS), from SEED=$(SEED))"
	@echo "make day     simulate 24 hours of a job whose parties come and go; check that memory stays constant (SEED=$(SEED))"
	@echo "make setup   set up .venv only"
	@echo "make extras  add the extras (MLflow, TensorBoard, notebooks, documentation tools) to .venv"
	@echo "make hooks   check each commit of this clone before it is made: ruff, mypy, fast tests"
	@echo "make surface  record the public surface and the schema of experiment files (RELEASED=1: as the surface of this version)"
	@echo "make docs    build the documentation into site/; fail on a broken link"
	@echo "make bench   compare Hansa with hand-written baselines (BENCH_ARGS=... : --model cnn, --repeats 5)"
	@echo "make bench-check  fail if a path is more than 25% slower than recorded, relative to a floor, in 3 minutes (BENCH_ARGS=--record: record the ratios)"
	@echo "make bench-peers   compare Hansa with Flower, pfl and FedJAX, each in its own environment (BENCH_ARGS=--nvflare: also NVFLARE)"
	@echo "make bench-fusion  measure time and memory of each fusion, compared with Flower (BENCH_ARGS=... : --out-of-core, --gpu)"
	@echo "make bench-secure  measure seconds and bytes of a masked sum, compared with Flower's SecAgg+ (BENCH_ARGS=... : --parties 50)"
	@echo "make bench-deploy  measure rounds per second of a deployment on loopback, compared with Flower (BENCH_ARGS=... : --upload 400, --memory 1)"
	@echo "make bench-dp  compare rounds of DP-SGD with rounds of SGD, and one party with Opacus (BENCH_ARGS=... : --repeats 5)"
	@echo "make bench-paillier  measure values per second of encrypted sums, compared with phe (BENCH_ARGS=... : --bits 3072)"
	@echo "make bench-psi  measure private set intersection, compared with OpenMined's (BENCH_ARGS=... : --people 10000 1000000)"
	@echo "make privacy-figures  draw the figures of docs/privacy.md (HANSA_DATA names the folder with MNIST)"
	@echo "make lock    resolve requirements/*.in into requirements/*.txt (LOCK_ARGS=--upgrade for newer versions)"
	@echo "make clean   remove .venv, caches and build output"
	@echo "PYTHON=...   the interpreter to build .venv with (3.11 or newer; now '$(PYTHON)')"

setup: $(READY)

extras: $(EXTRAS)

hooks:
	@git config core.hooksPath .githooks
	@echo "git runs .githooks/pre-commit before each commit (git commit --no-verify skips it)"

surface: $(READY)
	@$(BIN)/python tests/public/public_surface.py $(if $(RELEASED),--release)

docs: $(EXTRAS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(READY)
	@$(BIN)/hansa demo $(DEMO_ARGS)

demo-net: $(READY)
	@rm -rf runs/demo-net
	@$(BIN)/hansa demo-net $(DEMO_ARGS)

test: lint
	@echo "==> pytest"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS) --tier fast

test-rest: $(READY)
	@echo "==> pytest: tests that make test left out or skipped"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS) --tier rest

test-budget: $(READY)
	@$(BIN)/python tests/budget.py $(BUDGET)

test-products: lint
	@$(BIN)/coverage erase
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/coverage run -m pytest $(PYTEST_ARGS) --tier night --durations=25
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

test-night: $(EXTRAS)
	@$(BIN)/python tests/night.py test-products $(CAMPAIGNS)

test-gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu needs an NVIDIA GPU that PyTorch can use; torch.cuda.is_available() is False here.")'
	@$(BIN)/python -m pytest tests/sim/test_gpu.py tests/adversary/test_attacked_runs.py tests/matching/test_matched_layers.py tests/cluster/test_ray_gpus.py -m "" -k "gpu or cuda"

lint: $(READY)
	@echo "==> ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "==> mypy"
	@$(BIN)/mypy

chaos: $(READY)
	@$(BIN)/python tests/chaos/chaos.py --kills $(KILLS) --seed $(SEED)

weather: $(READY)
	@$(BIN)/python tests/chaos/weather.py --minutes $(MINUTES) --seed $(SEED)

power: $(READY)
	@$(BIN)/python tests/chaos/power.py --seeds $(SEEDS)

load: $(READY)
	@$(BIN)/python benchmarks/load.py --parties $(PARTIES) --seed $(SEED) $(BENCH_ARGS)

dst: $(READY)
	@$(BIN)/python tests/dst/dst.py --seeds $(SEEDS) --first $(SEED)

day: $(READY)
	@$(BIN)/python tests/dst/day.py --seed $(SEED)

bench: $(READY)
	@$(BIN)/python benchmarks/compare.py $(BENCH_ARGS)

bench-check: $(READY)
	@$(BIN)/python benchmarks/check.py $(BENCH_ARGS)

bench-peers: $(READY) $(PEERS:%=$(ENVS)/%/.ready)
	@$(BIN)/python benchmarks/compare.py --peers $(BENCH_ARGS)

bench-fusion: $(READY) $(ENVS)/flower/.ready
	@$(BIN)/python benchmarks/fusion.py $(BENCH_ARGS)

bench-deploy: $(READY) $(ENVS)/flower/.ready
	@$(BIN)/python benchmarks/deployment.py --peers $(BENCH_ARGS)

bench-secure: $(READY) $(ENVS)/flower/.ready
	@$(BIN)/python benchmarks/secure_sum.py $(BENCH_ARGS)

bench-dp: $(READY) $(ENVS)/opacus/.ready
	@$(BIN)/python benchmarks/dp_sgd.py $(BENCH_ARGS)

bench-paillier: $(READY) $(ENVS)/phe/.ready
	@$(BIN)/python benchmarks/paillier.py $(BENCH_ARGS)

bench-psi: $(EXTRAS) $(ENVS)/openmined/.ready
	@$(BIN)/python benchmarks/psi.py $(BENCH_ARGS)

privacy-figures: $(READY)
	@$(BIN)/python docs/privacy_figures.py

# torch is installed first, in its exact version.
$(ENVS)/%/.ready: benchmarks/peers/%/requirements.txt requirements/torch.txt
	@$(check-python)
	@echo "==> setting up $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@! grep -q '^torch==' $< || $(@D)/bin/python -m pip --disable-pip-version-check -qq install -r requirements/torch.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install -r $<
	@touch $@

# The lock is installed first, so that the requirements it shares with torch are hash-checked. torch then adds only the
# further requirements of its build (none for a CPU build).
$(DEPS): requirements/lock.txt requirements/torch.txt
	@$(check-python)
	@echo "==> setting up $(VENV) (a minute or two the first time)"
	@rm -f $(DEPS) $(READY)
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "    locked requirements"
	@$(PIP) install --require-hashes --no-deps -r requirements/lock.txt
	@echo "    torch"
	@$(PIP) install -r requirements/torch.txt
	@touch $@

$(READY): $(DEPS) pyproject.toml
	@echo "    hansa (editable)"
	@rm -f $@
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(EXTRAS): $(READY) requirements/extras.txt
	@echo "    extras"
	@rm -f $@
	@$(PIP) install --require-hashes --no-deps -r requirements/extras.txt
	@touch $@

# The release tools can import from the project's environment, but change nothing in it.
$(TOOLS): $(READY) requirements/release.txt
	@echo "==> setting up $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install --require-hashes --no-deps -r requirements/release.txt
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	@touch $@

fuzz: $(TOOLS)
	@$(RELEASE)/bin/python tests/fuzz/fuzz.py --minutes $(FUZZ_MINUTES) --jobs $(JOBS)

interference: $(READY)
	@$(BIN)/python tests/interference/interfere.py --minutes $(MINUTES) --seed $(SEED)

mutants: $(READY)
	@test -n "$(MODULE)" || { echo "make mutants needs a file or a package, as in 'make mutants MODULE=src/hansa/fusion'" >&2; exit 2; }
	@OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/mutants.py $(MODULE) --jobs $(JOBS) $(if $(SAMPLE),--sample $(SAMPLE) --seed $(SEED))

audit: $(TOOLS)
	@mkdir -p dist
	@if test "$(AUDIT)" = skip; then echo "audit skipped: AUDIT=skip"; else \
	  $(RELEASE)/bin/python release/audit.py dist/audit.json requirements/lock.txt requirements/extras.txt requirements/torch.txt; fi

# Quick steps and steps that need external services come first; long steps come last.
release: lint $(TOOLS)
	@rm -rf build dist && mkdir dist
	@echo "==> sdist and wheel"
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")' > /dev/null
	@$(BIN)/python release/check_dist.py dist
	@echo "==> audit"
	@$(MAKE) --no-print-directory audit
	@echo "==> bill of materials"
	@$(RELEASE)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible \
	  -o dist/sbom.cdx.json && echo "dist/sbom.cdx.json"
	@$(MAKE) --no-print-directory test-night CAMPAIGNS="$(CAMPAIGNS:dst=dst:SEEDS=$(RELEASE_SEEDS))"
	@echo "==> dist/ holds the release"

# Hashes come only from the public registry: the resolver ignores extra indexes and local folders of wheels.
COMPILE := env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null CUSTOM_COMPILE_COMMAND="make lock" \
  .venv-lock/bin/pip-compile -q --no-config --generate-hashes --allow-unsafe --strip-extras \
  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host $(LOCK_ARGS)

lock:
	@$(check-python)
	@test -x .venv-lock/bin/pip-compile || { $(PYTHON) -m venv --clear .venv-lock && \
	  .venv-lock/bin/python -m pip --disable-pip-version-check -q install pip-tools==7.6.2; }
	@echo "==> resolving requirements/*.in (takes minutes)"
	@$(COMPILE) -o requirements/lock.txt requirements/runtime.in requirements/dev.in
	@$(COMPILE) -o requirements/release.txt requirements/release.in
	@$(COMPILE) -o requirements/extras.txt requirements/extras.in

clean:
	@rm -rf $(VENV) .venv-lock $(RELEASE) $(ENVS) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
