"""Looks at an installed accel_scaler as a stranger would; for `make check-dist`, test_wheel.py.

    PYTHON -I installed.py FOLDER

PYTHON is an environment's that holds accel_scaler and what it requires, nothing else. FOLDER is
empty. A fault is told, with exit status 1.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

LIMIT_S = 240
TRAIN = """
import torch
from accelerate import Accelerator
from accel_scaler import ScalerConfig, attach
accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"),
                     ScalerConfig(step_mode="overlap", telemetry="run.jsonl", init_scale=2.0**10))
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
losses = []
for _ in range(40):
    loss = (model(torch.ones(2, 4)) - 3.0).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
accelerator.end_training()
assert losses[-1] < 1e-3 * losses[0], losses
"""


def expect(true: bool, *said: object) -> None:
    if not true:
        raise SystemExit("fault: " + " ".join(map(str, said)))


def run(folder: Path, *command: str, code: int = 0) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    said = done.stdout + done.stderr
    expect(done.returncode == code, command, "ended with", done.returncode, "\n", said)
    expect("Traceback" not in said, command, "shows a traceback:\n", said)
    return said


def python(folder: Path, code: str) -> str:
    return run(folder, sys.executable, "-I", "-c", code)


def look_at_commands(folder: Path) -> str:
    expect(importlib.util.find_spec("transformers") is None, "transformers is not to be here")
    ours = str(Path(sys.executable).parent / "accel-scaler")
    shown = run(folder, ours, "--help")
    expect(all(name in shown for name in ("test", "launch", "report")), shown)
    for name in ("test", "launch", "report"):
        expect("usage:" in run(folder, ours, name, "--help").lower(), name)
    told = run(folder, ours, "test", "--device", "cpu")
    expect(" 0 failed" in told, told)
    python(folder, TRAIN)
    records = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    expect(len(records) >= 40, "telemetry has", len(records), "lines")
    run(folder, ours, "report", "run.jsonl")
    page = (folder / "report.html").read_text("utf-8")
    expect("uPlot" in page and "chart-loss" in page, "the page has no charts")
    (folder / "script.py").write_text(TRAIN.replace("run.jsonl", "launched.jsonl"))
    run(folder, ours, "launch", "--config_file", "cpu_fp16", "script.py")
    expect((folder / "launched.jsonl").is_file(), "the launched script left no telemetry")
    told = run(folder, ours, "launch", "--dry_run", "--config_file", "cpu_fp16", "script.py")
    expect("error" not in told and "step_mode" in told, "a dry run prints", told)
    return "commands: help, test, launch, report work"


if __name__ == "__main__":
    print(look_at_commands(Path(sys.argv[1])))
