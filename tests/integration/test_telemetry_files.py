"""Attached loops whose telemetry files are compared with plain torch beside them, bit for bit."""

from __future__ import annotations

import gc
import math
import platform
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from async_support import lazy
from support import mlp
from telemetry_runs import (
    INF,
    MODES,
    Beside,
    attached,
    kinds_of,
    lines_of,
    loss_of,
    sgd,
    windows_of,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from accel_scaler import ScalerConfig
from accel_scaler.devices import device_name

pytestmark = pytest.mark.usefixtures("one_thread")

EACH_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
OVERFLOWS = (0, 3, 4)
WINDOWS = 8


def train(
    accelerator: Any,
    *,
    windows: int = WINDOWS,
    max_norm: float | None = 0.5,
    scale: dict[str, Any] | None = None,
    accumulation: int = 1,
    model: nn.Module | None = None,
    make: Callable[..., torch.optim.Optimizer] = sgd,
    overflows: tuple[int, ...] = OVERFLOWS,
) -> Beside:
    """A loop with a schedule; at each boundary plain torch looks at the gradients first."""
    plain = mlp() if model is None else model
    inner = make(plain.parameters())
    schedule = ExponentialLR(inner, 0.7)
    prepared, optimizer, schedule = accelerator.prepare(plain, inner, schedule)
    beside = Beside(plain.named_parameters(), **(scale or {}))
    for number in range(windows * accumulation):
        window, micro = divmod(number, accumulation)
        with accelerator.accumulate(prepared):
            loss = loss_of(prepared, number)
            bad = window in overflows and micro == 0
            accelerator.backward(loss * INF if bad else loss)
            if accelerator.sync_gradients:
                rates = [group["lr"] for group in inner.param_groups]
                beside.look(max_norm, rates)
                if max_norm is not None:
                    accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return beside


@pytest.mark.parametrize("accumulation", [1, 3])
@EACH_MODE
def test_every_window_is_what_plain_torch_says(
    tmp_path: Path, mode: dict[str, Any], accumulation: int
) -> None:
    path, rule = tmp_path / "run.jsonl", {"growth_interval": 2}
    with attached(path, accumulation=accumulation, **mode, **rule) as accelerator:
        beside = train(accelerator, accumulation=accumulation, scale=rule)
        history = accelerator.scaler_history
    found = beside.assert_tells(path)
    for line, record in zip(found, history.records, strict=True):  # memory holds what the file does
        for key in ("scale", "next_scale", "found_inf", "skipped", "grad_norm", "max_norm"):
            assert getattr(record, key) == line[key]
        assert (record.index, list(record.lr)) == (line["step"], line["lr"])
        assert record.norms is not None or record.skipped
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


Clip = Callable[[Any, list[Tensor]], Any]
CLIPS: dict[str, Clip] = {
    "none": lambda a, p: None,
    "inf norm": lambda a, p: a.clip_grad_norm_(p, 0.05, norm_type=INF),
    "value": lambda a, p: a.clip_grad_value_(p, 0.01),
    "some parameters": lambda a, p: a.clip_grad_norm_(p[2:], 0.1),
    "twice": lambda a, p: (a.clip_grad_norm_(p, 0.3), a.clip_grad_norm_(p, 0.1)),
}


def one_window(path: Path, clip: Clip, **mode: Any) -> tuple[Any, Any]:
    """The record of one window without overflow, and what plain torch says of it."""
    with attached(path, **mode) as accelerator:
        plain = mlp()
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        accelerator.backward(loss_of(model, 0))
        expected = Beside(plain.named_parameters()).look()
        clip(accelerator, list(model.parameters()))
        optimizer.step()
    (line,) = windows_of(path)
    return line, expected


@EACH_MODE
def test_what_a_clip_leaves_on_record(tmp_path: Path, mode: dict[str, Any]) -> None:
    for name in ("none", "value"):
        line, expected = one_window(tmp_path / name, CLIPS[name], **mode)
        assert (line["max_norm"], line["clip_coefficient"]) == (None, None), name
        assert line["grad_norm"] in (None, expected["grad_norm"])
        assert line.get("norms") in (None, expected["norms"])

    line, expected = one_window(tmp_path / "inf", CLIPS["inf norm"], **mode)
    assert (line["max_norm"], line.get("norms")) in ((0.05, None), (0.05, expected["norms"]))
    assert 0 < line["grad_norm"] < expected["grad_norm"]
    assert line["clip_coefficient"] == pytest.approx(0.05 / (line["grad_norm"] + 1e-6), rel=1e-6)

    line, expected = one_window(tmp_path / "some", CLIPS["some parameters"], **mode)
    some = {name: expected["norms"][name] for name in ("2.weight", "2.bias")}
    assert line["grad_norm"] == pytest.approx(math.hypot(*some.values()), rel=1e-5)
    for name, norm in line["norms"].items():
        assert norm == expected["norms"][name] or (math.isnan(norm) and name not in some)

    line, expected = one_window(tmp_path / "twice", CLIPS["twice"], **mode)
    assert line["grad_norm"] == expected["grad_norm"], "the norm before both"
    assert (line["norms"], line["max_norm"]) == (expected["norms"], 0.1)
    # What is left of the gradients: 0.3 of the norm, and then 0.1 of that.
    assert line["clip_coefficient"] == pytest.approx(0.1 / expected["grad_norm"], rel=1e-3)


# What the update took, and who waited for it.


@EACH_MODE
def test_the_times_of_an_update_are_those_of_its_mode(tmp_path: Path, mode: dict[str, Any]) -> None:
    path = tmp_path / "run.jsonl"
    with attached(path, accumulation=2, **mode) as accelerator:
        train(accelerator, accumulation=2, windows=5, overflows=(1,))
    before = 0.0
    for line in windows_of(path):
        assert line["time"] >= before
        before = line["time"]
        assert ("optimizer_us" in line) == (not line["skipped"])
        if not line["skipped"]:
            assert 0 <= line["waited_us"] <= line["optimizer_us"]
            if not mode:
                assert line["waited_us"] == line["optimizer_us"]


def test_a_wait_for_the_update_is_on_record(tmp_path: Path) -> None:
    """A part of the update runs when somebody waits for it, so the next forward has to."""
    path = tmp_path / "run.jsonl"
    with lazy(), attached(path, step_mode="overlap") as accelerator:
        train(accelerator, windows=5, overflows=())
    for line in windows_of(path)[:-1]:
        assert 0 < line["waited_us"] <= line["optimizer_us"]


@pytest.mark.parametrize("file", [True, False], ids=["file", "no file"])
def test_nothing_keeps_a_dropped_model_alive(tmp_path: Path, file: bool) -> None:
    path = tmp_path / "run.jsonl"
    with attached(path if file else None, find_overflow="always") as accelerator:
        plain = mlp()
        train(accelerator, windows=2, overflows=(1,), model=plain)
        gone = [weakref.ref(plain), *map(weakref.ref, plain.parameters())]
        accelerator.free_memory()
        del plain
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
