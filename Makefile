# make train: a real fp16 fine-tune. make test: the test suite. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch comes first and alone: a range, or another package's need, could bring a CUDA build.
STAMP := $(VENV)/.installed
WORKERS ?= 2
THREADED := gradients fused boundary small memory_cost

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: train test test-gpu lint types report clean
.PHONY: bench bench-overlap bench-telemetry bench-convergence bench-gpu

train: $(STAMP)
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/finetune_classifier.py

# One test file on each core, so one thread each; then the kernels once more, over all threads.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile \
		--durations=15 $(ARGS)
ifeq ($(ARGS),)
	$(BIN)/python -m pytest -q $(addprefix tests/test_,$(addsuffix .py,$(THREADED)))
endif

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The picture in the README: what a recipe's run, the scale growing every fourth step, looks like.
report: $(STAMP)
	rm -rf out/report
	$(BIN)/accel-scaler launch --config_file cpu_fp16 --telemetry out/report/run.jsonl \
		--step_mode overlap --growth_interval 4 recipes/trainer_swap.py --output_dir out/report/model
	$(BIN)/accel-scaler report out/report/run.jsonl -o out/report/report.html
	$(BIN)/accel-scaler report out/report/run.jsonl --format png -o assets/report.png

bench: $(STAMP)
	$(BIN)/python benchmarks/boundary.py

bench-overlap: $(STAMP)
	$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-telemetry: $(STAMP)
	$(BIN)/python benchmarks/telemetry.py $(ARGS)

bench-convergence: $(STAMP)
	$(BIN)/python benchmarks/convergence.py $(ARGS)

# On a machine with a GPU; VENV names an environment with a torch for it, and the peers to compare.
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
