"""Accelerate's own check scripts, unchanged, under ``accel-scaler launch`` and, beside it, stock.

Stock trains these in float32, whatever fp16 it is told, since it has no fp16 on a CPU; with our
section they train in fp16 with a scaler, and must print what they print there. Of its other scripts
some need GPUs, DeepSpeed or the hub, some fail or hang in stock too, some make no Accelerator.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import accelerate.test_utils.scripts
import pytest
from children import free_port
from launching import OURS, STOCK, finish, start

SCRIPTS = Path(accelerate.test_utils.scripts.__path__[0])
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp16
num_machines: 1
num_processes: 2
"""
SECTION = """accel_scaler:
  step_mode: {mode}
  telemetry: run.jsonl
"""


def letters(text: str) -> Counter[str]:
    """The letters of the output, which two ranks print into each other's lines, in any order."""
    return Counter("".join(text.split()))


@pytest.mark.parametrize(
    ("script", "mode", "windows"),
    [
        # Two samplers, each with two ways to split in fp16, one run in fp16 by name and one in bf16
        # (at scale 1, so that no section may set a scale), of three epochs of four batches.
        ("test_script.py", "overlap", {65536.0: 2 * 3 * 12, 1.0: 2 * 1 * 12}),
        # 80 rows in batches of 16, two batches a window; the last window is cut short. It reads
        # gradients after the step, which the asynchronous modes have taken by then.
        ("test_sync.py", "sync", {65536.0: 2}),
    ],
)
def test_it_passes_on_two_ranks_as_under_stock_and_trains_attached(
    tmp_path: Path, script: str, mode: str, windows: dict[float, int]
) -> None:
    """``windows``: how many rank 0 trains with which scale."""
    section = SECTION.format(mode=mode)
    processes = []
    for name, launch, config in (("stock", STOCK, CONFIG), ("ours", OURS, CONFIG + section)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(config)
        port = ["--main_process_port", free_port()]
        command = [*launch, "--config_file", "config.yaml", *port, SCRIPTS / script]
        processes.append(start(command, folder, ACCELERATE_USE_CPU="true"))
    stock, ours = map(finish, processes)
    assert stock[0] == 0, f"stock fails: {stock[2]}"
    assert ours[0] == 0, ours[2]
    assert letters(ours[1]) == letters(stock[1])
    # A script's Accelerators share the file.
    lines = map(json.loads, (tmp_path / "ours" / "run.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "window"]
    assert Counter(record["scale"] for record in records) == windows
    assert not any(record["skipped"] for record in records)
    assert not (tmp_path / "stock" / "run.jsonl").exists()
