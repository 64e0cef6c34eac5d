"""Scripts that TRL and Accelerate install, unchanged, in bf16 under ``accel-scaler launch``.

What each saves is what it saves under ``accelerate launch``, bit for bit. docs/compared.md has
those that are not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from launching import OURS, STOCK, finish, start
from places import HELPERS
from safetensors.torch import load_file
from support import same

pytest.importorskip("peft")
pytest.importorskip("trl", minversion="1.16", reason="an older one has other scripts")

import trl
from small_models import write_inputs

STEPS = 3
TRAINER = (
    "--model_name_or_path llama --use_cpu --report_to none --disable_tqdm 1 --seed 1 "
    "--per_device_train_batch_size 4 --learning_rate 1e-2 --logging_steps 1 "
    f"--max_steps {STEPS} --save_steps {STEPS} "
)
SAMPLED = TRAINER + "--dataset_name prompts --max_completion_length 4 "
TRL, ACCELERATE = Path(trl.__file__).parent, Path(accelerate.__file__).parent
SCRIPTS = {
    "sft": TRAINER + "--dataset_name texts --gradient_accumulation_steps 2",
    "sft, LoRA": TRAINER + "--dataset_name texts --use_peft --lora_r 2",
    "kto": TRAINER + "--dataset_name judged",
    "reward": TRAINER + "--dataset_name pairs",
    "rloo": SAMPLED + "--num_generations 2 --reward_funcs run_others.share",
    "distillation": SAMPLED + "--teacher_model_name_or_path teacher",
    # Two epochs of two batches.
    "test_checkpointing": "--model_name_or_path llama",
}
WINDOWS = 6 * STEPS + 4
OF_THE_CLOCK = ("runtime", "per_second", "flos", "step_time", "scaler_skips")


def file_of(name: str) -> Path:
    external = ACCELERATE / "test_utils/scripts/external_deps"
    return (external if "test" in name else TRL / "scripts") / f"{name.split(',')[0]}.py"


def saved(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, schedule, and what was logged but for what the clock says."""
    found: dict[str, Any] = {}
    for file in folder.rglob("*.*"):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            found[name] = load_file(file)
        elif file.stem in ("optimizer", "scheduler"):
            found[name] = torch.load(file)
        elif file.name == "trainer_state.json":
            logged = json.loads(file.read_text())["log_history"]
            items = [(key, value) for entry in logged for key, value in entry.items()]
            found[name] = [item for item in items if not any(t in item[0] for t in OF_THE_CLOCK)]
    return found


@pytest.mark.process
def test_each_saves_what_it_saves_under_stock(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    processes = {}
    for way in ("stock", "sync", "overlap"):
        ours = [*OURS, "--step_mode", way, "--telemetry", f"{way}.jsonl"]
        launch = [*(STOCK if way == "stock" else ours), "--cpu", "--mixed_precision", "bf16"]
        jobs = [(f"{way}/{name}", str(file_of(name)), SCRIPTS[name].split()) for name in SCRIPTS]
        for name, _, _ in jobs:
            (tmp_path / name).mkdir(parents=True)
        processes[way] = start([*launch, HELPERS / "run_others.py", json.dumps(jobs)], tmp_path)
    said = {way: finish(process) for way, process in processes.items()}
    assert {way: code for way, (code, _, _) in said.items()} == dict.fromkeys(said, 0), said
    for name in SCRIPTS:
        stock = saved(tmp_path / "stock" / name)
        assert {Path(file).stem for file in stock} >= {"optimizer", "scheduler"}, name
        for way in ("sync", "overlap"):
            ours = saved(tmp_path / way / name)
            assert ours.keys() == stock.keys(), (way, name)
            assert [file for file in stock if not same(ours[file], stock[file])] == [], (way, name)
    for way in ("sync", "overlap"):
        lines = map(json.loads, (tmp_path / f"{way}.jsonl").read_text().splitlines())
        skipped = [line["skipped"] for line in lines if line["kind"] == "window"]
        assert skipped == [False] * WINDOWS, way
