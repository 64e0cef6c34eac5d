"""The scaler's values in a real wandb run, offline, read back from its file."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import run

pytestmark = pytest.mark.process

SCRIPT = """
import sys
import torch, wandb
from accelerate import Accelerator
from accel_scaler import attach
from support import mlp
from telemetry_runs import INF, loss_of, sgd

style = sys.argv[1]
own = style == "directly"
accelerator = attach(
    Accelerator(cpu=True, mixed_precision="fp16", log_with=None if own else "wandb"),
    tracker_interval=2, init_scale=1024.0,
)
wandb.init(project="run") if own else accelerator.init_trackers("run")
plain = mlp()
model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
for window in range(9):
    accelerator.backward(loss_of(model, window) * (INF if window == 4 else 1.0))
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    if style == "every window":
        accelerator.log({"loss": window}, step=window)
    if style == "epochs" and window % 3 == 2:
        accelerator.log({"loss": window}, step=window // 3)
    if own:
        wandb.run.log({"loss": window})
if style != "without an end":
    accelerator.end_training()
"""

STYLES = {
    "every window": {n: n for n in range(9)},
    "epochs": {0: 2, 1: 5, 2: 8},
    "directly": {n: n for n in range(9)},
    "without an end": {},
}


def records(path: Path) -> Iterator[Any]:
    """Of a run's file: LevelDB's log, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # a block ends with zeros
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


@pytest.mark.parametrize("style", STYLES)
def test_rows_of_both_are_there(style: str, tmp_path: Path) -> None:
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    code, _, err = run([sys.executable, "-c", SCRIPT, style], tmp_path, **settings)
    assert code == 0, err
    assert "could not be sent" not in err
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows: dict[int, dict[str, Any]] = {}
    axes = {}
    for record in records(path):
        if record.HasField("metric"):
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        if record.HasField("history"):
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            assert record.history.step.num not in rows
            rows[record.history.step.num] = row
    assert {step: row["loss"] for step, row in rows.items() if "loss" in row} == STYLES[style]
    ours = {row["scaler/window"]: row for row in rows.values() if "scaler/window" in row}
    assert sorted(ours) == [0, 2, 4, 6, 8]
    assert axes["scaler/*"] == "scaler/window"
    assert [ours[window]["scaler/skips"] for window in sorted(ours)] == [0, 0, 1, 1, 1]
    for window, row in ours.items():
        bins = row.get("scaler/gradients/0.weight/bins")
        assert (bins is None) == (window == 4)
        if bins is not None:
            assert len(bins) == len(row["scaler/gradients/0.weight/values"]) + 1
            assert sum(row["scaler/gradients/0.weight/values"]) == 8 * 16
            assert bins == sorted(bins)
