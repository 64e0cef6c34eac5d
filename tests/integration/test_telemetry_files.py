"""Attached loops whose telemetry files are compared with plain torch beside them, bit for bit."""

from __future__ import annotations

import gc
import platform
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from async_support import lazy
from support import mlp
from telemetry_runs import (
    INF,
    Beside,
    attached,
    kinds_of,
    lines_of,
    loss_of,
    sgd,
    windows_of,
)
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from accel_scaler import ScalerConfig
from accel_scaler.devices import device_name

pytestmark = pytest.mark.usefixtures("one_thread")

EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])
OVERFLOWS = (0, 3, 4)
WINDOWS = 8


def train(
    accelerator: Any,
    *,
    windows: int = WINDOWS,
    growth_interval: int = 2000,
    accumulation: int = 1,
    model: nn.Module | None = None,
    overflows: tuple[int, ...] = OVERFLOWS,
) -> Beside:
    """A loop with a schedule; at each boundary plain torch looks at the gradients first."""
    plain = mlp() if model is None else model
    inner = sgd(plain.parameters())
    schedule = ExponentialLR(inner, 0.7)
    prepared, optimizer, schedule = accelerator.prepare(plain, inner, schedule)
    beside = Beside(plain.named_parameters(), growth_interval)
    for number in range(windows * accumulation):
        window, micro = divmod(number, accumulation)
        with accelerator.accumulate(prepared):
            loss = loss_of(prepared, number)
            bad = window in overflows and micro == 0
            accelerator.backward(loss * INF if bad else loss)
            if accelerator.sync_gradients:
                rates = [group["lr"] for group in inner.param_groups]
                beside.look(0.5, rates)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return beside


@pytest.mark.parametrize("accumulation", [1, 3])
@EACH_MODE
def test_every_window_is_what_plain_torch_says(
    tmp_path: Path, mode: str, accumulation: int
) -> None:
    path, given = tmp_path / "run.jsonl", {"step_mode": mode, "growth_interval": 2}
    with attached(path, accumulation=accumulation, **given) as accelerator:
        beside = train(accelerator, accumulation=accumulation, growth_interval=2)
        history = accelerator.scaler_history
    found = beside.assert_tells(path)
    for line, record in zip(found, history.records, strict=True):  # memory holds what the file does
        for key in ("scale", "next_scale", "found_inf", "skipped", "grad_norm", "max_norm"):
            assert getattr(record, key) == line[key]
        assert (record.index, list(record.lr)) == (line["step"], line["lr"])
        assert record.norms is None  # they are in the file alone
    assert [line["skipped"] for line in found] == [n in OVERFLOWS for n in range(WINDOWS)]
    assert len({line["scale"] for line in found}) >= 3
    assert len({line["lr"][0] for line in found}) > 3
    assert any(line["clip_coefficient"] not in (None, 1.0) for line in found)
    # The loss of the first micro-batch of these windows was inf.
    assert [line.get("loss_nonfinite", 0) for line in found] == [
        int(n in OVERFLOWS) for n in range(WINDOWS)
    ]
    times = [line["time"] for line in found]
    assert times == sorted(times)
    assert times[0] > 0
    assert kinds_of(path)[0] == "start"
    end = lines_of(path)[-1]
    assert (end["kind"], end["error"]) == ("end", None)


def test_the_start_says_what_runs_with_which_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with attached(path, min_scale=0.5, step_mode="overlap"):
        (start,) = lines_of(path)
    facts = ("rank", "ranks", "device", "precision", "torch", "python")
    assert [start[key] for key in facts] == [
        *(0, 1, "cpu", "fp16", torch.__version__, platform.python_version())
    ]
    assert start["device_name"] == device_name(torch.device("cpu"))
    assert set(start["changed"]) == {"min_scale", "step_mode", "init_scale"}
    assert start["settings"]["min_scale"] == 0.5
    assert start["settings"]["step_mode"] == "overlap"
    assert start["settings"].keys() == ScalerConfig.__dataclass_fields__.keys()
    assert start["package"]
    assert start["accelerate"]


# What the update took, and who waited for it.


@EACH_MODE
def test_the_times_of_an_update_are_those_of_its_mode(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "run.jsonl"
    with attached(path, accumulation=2, step_mode=mode) as accelerator:
        train(accelerator, accumulation=2, windows=5, overflows=(1,))
    before = 0.0
    for line in windows_of(path):
        assert line["time"] >= before
        before = line["time"]
        assert ("optimizer_us" in line) == (not line["skipped"])
        if not line["skipped"]:
            assert 0 <= line["waited_us"] <= line["optimizer_us"]
            if mode == "sync":
                assert line["waited_us"] == line["optimizer_us"]


def test_a_wait_for_the_update_is_on_record(tmp_path: Path) -> None:
    """A part of the update runs when somebody waits for it, so the next forward has to."""
    path = tmp_path / "run.jsonl"
    with lazy(), attached(path, step_mode="overlap") as accelerator:
        train(accelerator, windows=5, overflows=())
    for line in windows_of(path)[:-1]:
        assert 0 < line["waited_us"] <= line["optimizer_us"]


def test_nothing_keeps_a_dropped_model_alive(tmp_path: Path) -> None:
    with attached(tmp_path / "run.jsonl", find_overflow="always") as accelerator:
        plain = mlp()
        train(accelerator, windows=2, overflows=(1,), model=plain)
        gone = [weakref.ref(plain), *map(weakref.ref, plain.parameters())]
        accelerator.free_memory()
        del plain
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
