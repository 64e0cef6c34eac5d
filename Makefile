# make train: a real fp16 fine-tune, and its report. make test: the test suite, without what starts
# processes; make test-all: all of it. Each sets up what it needs, in one environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Marks of the packages that recipes need, and of the packages that all the rest needs.
RECIPES := $(VENV)/.recipes
STAMP := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt
TORCH := $(or $(shell grep '^torch==' $(CONSTRAINTS)),torch)
WORKERS ?= 2
MINUTES ?= 60
SIMULATED := out/simulated
# Of random settings beside the CPU.
RANDOM_RUNS ?= 200
# Empty: others each time.
SEED ?=
TESTS ?= tests/unit tests/integration tests/property
# Their kernels run over all threads, too.
THREADED := $(wildcard tests/unit/optimizer_step/test_*.py) tests/unit/scaling/test_gradients.py

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: train test test-all test-gpu test-simulated test-oldest test-newest check-dist lint types report picture notebook docs clean
.PHONY: soak bench bench-guard bench-cpu bench-overlap bench-telemetry bench-overflow bench-load bench-offload bench-window bench-idle bench-gpu

# Passive: threads that wait for each other sleep. By default they spin, and where other processes
# want the cores a thread that spins keeps the one it waits for from running.
train bench-cpu: export OMP_WAIT_POLICY ?= passive

# A start so high that the first step overflows: it runs again at lower scales, and none is lost.
train: $(RECIPES)
	@rm -rf out/train
	$(BIN)/accel-scaler launch --config_file cpu_fp16 --num_cpu_threads_per_process 2 \
		--init_scale 1048576 --on_overflow retry --telemetry out/train/run.jsonl \
		recipes/finetune_classifier.py --output_dir out/train/model
	$(BIN)/accel-scaler report out/train/run.jsonl -o out/train/report.html

# These compare with a CPU's numbers, also where there is a GPU.
ON_CPU = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

# Tests on each core, so one thread each; a core that is done takes over the other's. No process is
# started.
test: $(STAMP)
	$(ON_CPU) $(BIN)/python -m pytest -m "not gpu and not process" -n $(WORKERS) \
		--dist worksteal --durations=15 $(TESTS) $(ARGS)

# Everything; then the kernels once more, over all threads.
test-all: $(STAMP)
	$(ON_CPU) $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile \
		--durations=15 $(ARGS)
ifeq ($(ARGS),)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q $(THREADED)
endif

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# The tests of a GPU on a simulated accelerator, each failing on a race; then random settings beside
# the CPU, bit for bit. Its own tests come first, without delays.
SIMULATE = PYTHONPATH=$(SIMULATED) OMP_NUM_THREADS=1 SIM_NAME=npu ACCELERATE_TORCH_DEVICE=npu:0
ON_SIMULATED = $(BIN)/python -m pytest -p simdev.pytest_plugin

test-simulated: $(SIMULATED)/simdev/_C.so
	$(SIMULATE) $(ON_SIMULATED) -q tests/simulated
	$(SIMULATE) SIM_DELAY=0.1,300,0.3,2000 $(ON_SIMULATED) -n $(WORKERS) --dist load tests/gpu $(ARGS)
	$(SIMULATE) $(BIN)/python -c "import simdev, runpy; \
		runpy.run_path('tests/gpu/random_settings.py', run_name='__main__')" \
		--runs $(RANDOM_RUNS) $(if $(SEED),--seed $(SEED))

$(SIMULATED)/simdev/_C.so: $(STAMP) $(addprefix tests/simulated/,sim.cpp build.sh) $(wildcard tests/simulated/package/*.py)
	@echo "Building the simulated accelerator with g++: 1 to 2 minutes."
	@bash tests/simulated/build.sh $(BIN)/python $(SIMULATED)

# The oldest releases that pyproject.toml allows, and the newest that the index has. Where it has
# no CPU build of that torch, this fetches gigabytes of CUDA packages.
test-oldest:
	$(MAKE) test-all VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-newest:
	$(MAKE) test-all VENV=.venv-newest CONSTRAINTS=/dev/null

# The wheel and the sdist in an environment that holds them and what they require, nothing else.
check-dist: $(STAMP)
	rm -rf out/dist
	$(BIN)/python -m hatchling build -d out/dist
	$(PYTHON) -m venv out/dist/empty
	out/dist/empty/bin/python -m pip install --quiet -c $(CONSTRAINTS) $(TORCH)
	out/dist/empty/bin/python -m pip install --quiet -c $(CONSTRAINTS) out/dist/*.whl
	mkdir out/dist/folder
	out/dist/empty/bin/python -I tests/helpers/installed.py out/dist/folder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The site, into out/docs. A broken link, anchor or name in it ends this with an error; --quiet would
# leave most of them untold.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open out/docs/index.html: search works without a server, too"

# The picture in the README: the page of a recipe's run, the scale growing every fourth step.
report: $(STAMP)
	rm -rf out/report
	$(BIN)/accel-scaler launch --config_file cpu_fp16 --telemetry out/report/run.jsonl \
		--step_mode overlap --growth_interval 4 recipes/trainer_swap.py --output_dir out/report/model
	$(BIN)/accel-scaler report out/report/run.jsonl -o out/report/report.html
	$(BIN)/python tests/helpers/page_picture.py out/report/report.html assets/report.png

# The first picture in the README, from the table that `make bench-offload` has printed.
picture: $(STAMP)
	$(BIN)/python benchmarks/headline.py docs/offload.md assets/offload.svg

# The notebook with the outputs of a run here, on the CPU.
notebook: $(STAMP)
	mkdir -p out/notebook
	cd out/notebook && ACCELERATE_USE_CPU=true MPLBACKEND=Agg CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
		$(abspath $(BIN))/python ../../tests/helpers/notebook_outputs.py ../../recipes/fp16_on_a_t4.ipynb

# Random histories in one process: no failure, and nothing that grows. ARGS="--seed 7"
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/stress/soak.py --minutes $(MINUTES) $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/boundary.py

bench-guard: $(STAMP)
	$(BIN)/python benchmarks/guard.py $(ARGS)

bench-cpu: $(STAMP)
	$(BIN)/python benchmarks/cpu_fp16.py $(ARGS)

bench-overlap: $(STAMP)
	$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-telemetry: $(STAMP)
	$(BIN)/python benchmarks/telemetry.py $(ARGS)

bench-overflow: $(STAMP)
	$(BIN)/python benchmarks/overflow.py $(ARGS)

bench-window: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/window.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/window.py --loop trainer $(ARGS)

bench-load: $(STAMP)
	$(BIN)/python benchmarks/load.py $(ARGS)

# As three machines with a GPU would take it: half an hour. ARGS="--machine T4"
bench-offload: $(SIMULATED)/simdev/_C.so
	$(SIMULATE) SIM_ARENA=4e11 $(BIN)/python -c "import simdev, runpy; \
		runpy.run_path('benchmarks/offload.py', run_name='__main__')" $(ARGS)

bench-idle: $(SIMULATED)/simdev/_C.so
	$(SIMULATE) PYTHONPATH=$(SIMULATED):benchmarks SIM_ARENA=4e11 $(BIN)/python -c "import simdev, runpy; \
		runpy.run_path('benchmarks/idle.py', run_name='__main__')" $(ARGS)

# On a machine with a GPU; VENV names an environment with a torch for it, and the peers to compare.
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# torch comes first and alone: a range, or another package's need, could bring a CUDA build.
$(RECIPES): pyproject.toml $(CONSTRAINTS)
	@echo "Installing torch and about 60 packages into $(VENV), once: 2 minutes, 1.8 GB. Where the"
	@echo "index has torch for CUDA alone, more; a CPU's: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) $(TORCH)
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[recipes]"
	@touch $@

$(STAMP): $(RECIPES)
	@echo "Installing what tests, benchmarks and the docs need into $(VENV), once: 2 minutes."
	@$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev]" -e tests/plugin
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest out .pytest_cache .mypy_cache .ruff_cache .hypothesis
