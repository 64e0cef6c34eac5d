"""Accelerate's own check scripts, unchanged, under ``accel-scaler launch`` and, beside it, stock.

Stock trains these in float32, whatever fp16 it is told, since it has no fp16 on a CPU; with our
section they train in fp16 with a scaler, and must print what they print there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import accelerate.test_utils.scripts
import pytest
from launching import free_port
from places import ROOT

SCRIPTS = Path(accelerate.test_utils.scripts.__path__[0])
LIMIT = 150
STOCK = ["accelerate.commands.launch"]
OURS = ["accel_scaler", "launch"]
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: fp16
num_machines: 1
num_processes: {ranks}
"""
SECTION = """accel_scaler:
  step_mode: {mode}
  init_scale: 1024
  telemetry: run.jsonl
"""

# Script, ranks, step mode, and how many windows rank 0 trains with which scale. test_sync reads
# gradients after the step, which the asynchronous modes have taken by then.
# test_script: two samplers, each with two ways to split in fp16, one run in fp16 by name and one in
# bf16 (recorded, not scaled), of three epochs of four batches.
SCRIPT = {1024.0: 2 * 3 * 12, 1.0: 2 * 1 * 12}
# test_sync: 80 rows in batches of 16, two batches a window; the last window is cut short.
PASS = [
    pytest.param("test_script.py", 1, "overlap", SCRIPT, id="script-1"),
    pytest.param("test_script.py", 2, "overlap", SCRIPT, id="script-2"),
    pytest.param("test_sync.py", 1, "sync", {1024.0: 3}, id="sync-1"),
    pytest.param("test_sync.py", 2, "sync", {1024.0: 2}, id="sync-2"),
]
NO_DATA = "asks the hub for a model or a data set, or imports `evaluate`, which loads from there"
NOT_HERE = {
    "test_ddp_comm_hook.py": "stock fails, and ours alike: it hands DDP device ids, "
    "for which there must be devices",
    "test_distributed_data_loop.py": "stock waits for ever: on a CPU join_uneven_inputs() joins "
    "nothing, so one rank is in a forward and the other in wait_for_everyone()",
    "test_notebook.py": "its fault tolerance check ends a rank that may hold the lock of a queue, "
    "and torch waits 30 s for it; test_notebook.py of this project launches two ranks instead",
    "test_merge_weights.py": "one rank does nothing; on two stock ends with KeyError: None, since "
    "FSDP wants an accelerator",
    "test_cli.py": "counts GPUs",
    "test_ops.py": "makes no Accelerator, so there is nothing to attach",
    "external_deps/test_pippy.py": "without two GPUs it does nothing",
    "external_deps/test_zero3_integration.py": "DeepSpeed, nccl",
    "external_deps/test_ds_multiple_model.py": "DeepSpeed",
    "external_deps/test_ds_alst_ulysses_sp.py": "DeepSpeed",
    "external_deps/test_checkpointing.py": NO_DATA,
    "external_deps/test_metrics.py": NO_DATA,
    "external_deps/test_performance.py": NO_DATA,
    "external_deps/test_peak_memory_usage.py": NO_DATA,
}

Ended = tuple[int, str, str]
"""Exit status, standard output, standard error."""


def start(
    command: list[str], script: str, ranks: int, folder: Path, config: str
) -> subprocess.Popen[str]:
    folder.mkdir()
    folder.joinpath("config.yaml").write_text(config)
    ours = ("ACCELERATE_", "ACCEL_SCALER_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment |= {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    port = ["--main_process_port", str(free_port())] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--config_file", "config.yaml", *port, SCRIPTS / script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stock_and_ours(script: str, ranks: int, mode: str, folder: Path) -> tuple[Ended, Ended]:
    """Both at a time, each in a folder of its name."""
    plain = CONFIG.format(kind="MULTI_GPU" if ranks > 1 else '"NO"', ranks=ranks)
    processes = [
        start(STOCK, script, ranks, folder / "stock", plain),
        start(OURS, script, ranks, folder / "ours", plain + SECTION.format(mode=mode)),
    ]
    try:
        said = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=30)
    stock, ours = (
        (process.returncode, *texts) for process, texts in zip(processes, said, strict=True)
    )
    return stock, ours


def letters(text: str) -> Counter[str]:
    """What was printed, by two ranks into each other's lines, so in any order."""
    return Counter("".join(text.split()))


def windows_of(path: Path) -> Counter[float]:
    """How many windows were trained with which scale. A script's Accelerators share the file."""
    found: Counter[float] = Counter()
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "window":
            found[record["scale"]] += 1
            assert not record["skipped"]
    return found


@pytest.mark.parametrize(("script", "ranks", "mode", "windows"), PASS)
def test_it_passes_as_under_stock_and_trains_attached(
    tmp_path: Path, script: str, ranks: int, mode: str, windows: dict[float, int]
) -> None:
    stock, ours = stock_and_ours(script, ranks, mode, tmp_path)
    assert stock[0] == 0, f"stock fails: {stock[2]}"
    assert ours[0] == 0, ours[2]
    assert letters(ours[1]) == letters(stock[1])
    if ranks == 1:
        assert ours[1] == stock[1]
    assert windows_of(tmp_path / "ours" / "run.jsonl") == windows
    assert not (tmp_path / "stock" / "run.jsonl").exists()


def test_every_script_of_accelerate_is_run_or_has_its_reason() -> None:
    there = {path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.rglob("test_*.py")}
    run = {str(case.values[0]) for case in PASS}
    assert run.isdisjoint(NOT_HERE)
    assert there <= run | NOT_HERE.keys()  # an older Accelerate has fewer
