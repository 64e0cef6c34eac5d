"""What telemetry records and logs: skips, names, and origins of overflows."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp, weights
from telemetry_runs import (
    INF,
    attached,
    kinds_of,
    lines_of,
    loss_of,
    sgd,
    windows_of,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_scaler import GradScaler, OverflowStreakError, ScalerConfig
from accel_scaler.optimizer_step import Boundary
from accel_scaler.telemetry import make_recorder, writer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is written when it is over; some would wait for the next ones."""
    monkeypatch.setattr(writer, "MAX_WAIT_S", 0.0)


EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])


def prepared(accelerator: Any, plain: nn.Module, **more: Any) -> tuple[Any, Any]:
    model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), **more))
    return model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any, number: int, factor: float = 1.0) -> None:
    accelerator.backward(loss_of(model, number) * factor)
    optimizer.step()
    optimizer.zero_grad()


def steps(count: int, accelerator: Any, model: Any, optimizer: Any, factor: float = 1.0) -> None:
    for number in range(count):
        step(accelerator, model, optimizer, number, factor)


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [text for r in caplog.records if part in (text := r.getMessage())]


# A run of skips.


@EACH_MODE
def test_a_run_of_skips_ends_after_a_last_record(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(
        path, max_consecutive_skips=6, find_overflow="off", step_mode=mode
    ) as accelerator:
        model, optimizer = prepared(accelerator, plain)
        step(accelerator, model, optimizer, 0)
        optimizer.synchronize()
        before = weights(plain)
        with caplog.at_level(logging.WARNING), pytest.raises(OverflowStreakError) as caught:
            steps(20, accelerator, model, optimizer, INF)
        assert kinds_of(path).count("window") == 8  # before the file is closed
        assert torch.equal(weights(plain), before)
    found, end, text = windows_of(path), lines_of(path)[-1], str(caught.value)
    assert [line["skipped"] for line in found] == [False] + [True] * 7
    assert end["error"] == f"OverflowStreakError: {text}"
    assert "7 steps in a row were skipped, max_consecutive_skips=6 allows 6" in text
    assert "The scale is now 32. " in text
    # Those that a check comes across, most often seen first.
    named = re.search(r"Non-finite gradients in: ([^.]+\.[a-z, ]+[^:]*?)\. The scale", text)
    assert named is not None
    assert set(named[1].split(", ")) <= {name for name, _ in plain.named_parameters()}
    (warning,) = messages(caplog, "skipped in a row")
    assert warning.startswith("2 steps skipped in a row; the run ends after 6 (max_c")


def overflow_in_gradient(model: nn.Module, on: dict[str, bool]) -> None:
    """While ``on``, the gradient of the last weight is inf in one element, the loss is finite."""

    def spoil(grad: Tensor) -> Tensor:
        if on.get("inf"):
            grad = grad.clone()
            grad.view(-1)[0] = INF
        return grad

    model[2].weight.register_hook(spoil)  # type: ignore[index, union-attr]


# Which parameters, where it began.


@EACH_MODE
def test_what_overflowed_is_named(tmp_path: Path, mode: str) -> None:
    path, plain, on = tmp_path / "run.jsonl", mlp(), {"inf": False}
    overflow_in_gradient(plain, on)
    with attached(path, step_mode=mode) as accelerator:
        model, optimizer = prepared(accelerator, plain)
        for number in range(4):
            on["inf"] = number == 2
            accelerator.backward(loss_of(model, number) * (INF if number == 1 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        records = list(accelerator.scaler_history.records)
    found = windows_of(path)
    assert ["overflowed" in line for line in found] == [False, True, True, False]
    assert set(found[1]["overflowed"]) <= {name for name, _ in plain.named_parameters()}
    assert tuple(found[2]["overflowed"]) == records[2].overflowed == ("2.weight",)
    assert [line.get("loss_nonfinite", 0) for line in found] == [0, 1, 0, 0]


class Loud(nn.Linear):
    """Overflows in float16 while ``factor`` is large."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Hot(nn.Sequential):
    """Its second layer is loud."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), Loud(8, 8), nn.Linear(8, 1))

    def turn(self, factor: float) -> None:
        self[1].factor = factor  # type: ignore[assignment]


@EACH_MODE
def test_where_it_began_is_in_the_record_the_log_and_the_error(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = tmp_path / "run.jsonl", Hot()
    settings = {"find_overflow": "always", "max_consecutive_skips": 2}
    with attached(path, **settings, step_mode=mode) as accelerator:
        model, optimizer = prepared(accelerator, plain)
        step(accelerator, model, optimizer, 0)
        plain.turn(1e7)
        with caplog.at_level(logging.WARNING), pytest.raises(OverflowStreakError) as caught:
            steps(5, accelerator, model, optimizer)
    found = windows_of(path)
    assert "first" not in found[0]
    for line in found[1:]:
        first = line["first"]
        assert (first["where"], first["module"], first["class"]) == ("forward", "1", "Loud")
        assert first["micro_batch"] == 0
        assert all(len(first[key]) == 2 for key in ("input", "output"))
        assert messages(caplog, f"step {line['step']} overflowed: {first['text']}")
    assert len(messages(caplog, "overflowed: ")) == len(found) - 1 == 3
    text = str(caught.value)
    assert found[-1]["first"]["text"] in text


# Telemetry reads nothing more from the device.


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: numbers read out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def reads(clip: bool, telemetry: str | None) -> list[int]:
    torch.manual_seed(0)
    model = mlp(64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    recorder = make_recorder(scaler, ScalerConfig(telemetry=telemetry), {"rank": 0, "ranks": 1})
    scaler.parameter_names.add_module(model)
    boundary = Boundary(scaler, torch.device("cpu"), recorder)
    boundary.add(optimizer)
    counts = []
    for _ in range(6):
        scaler.scale(model(torch.randn(16, 8)).pow(2).mean()).backward()
        with Reads() as seen:
            if clip:
                boundary.clipping.clip_norm(list(model.parameters()), 0.5)
            boundary.step(optimizer)
        counts.append(seen.count)
        optimizer.zero_grad()
    recorder.close()
    return counts


@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "not clipped"])
def test_a_boundary_reads_no_number_more_with_telemetry(clip: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    without, with_file = reads(clip, None), reads(clip, str(path))
    assert with_file == without
    assert without[-1] == 1  # the verdict
    assert ('"norms":' in path.read_text()) == clip
