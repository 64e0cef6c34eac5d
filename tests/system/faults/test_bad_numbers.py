"""NaN in the data, losses that are inf, scales at either end of float32, 10,000 skips in a row.

Each says what happens to the parameters, and after how many windows the user is told.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from fault_run import Run
from support import LR, Linear, reset, same, stock

from accel_scaler import ConfigError, GradScaler, OverflowStreakError, ScalerConfig, attach, detach
from accel_scaler.scaling.skips import WARNS_AT

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max


class Loop:
    """One parameter whose gradient is what the caller says; SGD."""

    def __init__(self, make: Any = None, **settings: Any) -> None:
        if make is None:
            plain = Accelerator(cpu=True, mixed_precision="fp16")
            self.accelerator: Any = attach(plain, ScalerConfig(optimizer_threads=1, **settings))
        else:
            self.accelerator = make()
        self.layer = Linear()
        self.model, self.optimizer = self.accelerator.prepare(
            self.layer, torch.optim.SGD(self.layer.parameters(), lr=LR)
        )

    def window(self, gradient: float, factor: float = 1.0) -> bool:
        """False if it was skipped."""
        self.accelerator.backward(self.model(gradient) * factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return not self.optimizer.step_was_skipped

    @property
    def scale(self) -> float:
        scale: float = self.accelerator.scaler.get_scale()
        return scale

    def close(self) -> None:
        self.accelerator.scaler.abandon_window()
        detach(self.accelerator)
        reset()


def told(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


class Spoiled(Run):
    """From some window on, for some windows, the data hold a NaN."""

    def __init__(self, mode: str, first: int, count: int, **settings: Any) -> None:
        super().__init__(mode, **settings)
        self.bad = range(first, first + count)

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        if self.progress.window in self.bad:
            rows = rows.index_fill(0, torch.tensor([0]), NAN)
        return super()._loss(rows)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed offload"])
def test_nan_in_the_data_of_one_batch_is_one_skip(mode: str) -> None:
    """Known to ``step_was_skipped`` in the same window. Lost: that window, nothing else."""
    before = Run(mode).train(4)
    expected = before.state()
    before.close()
    run = Spoiled(mode, 4, 1).train(5)
    state = run.state()
    assert run.seen[-1][3] is True
    assert same(state["weights"], expected["weights"])
    assert same(state["state"], expected["state"])
    assert same(state["schedule"], expected["schedule"])
    assert state["scaler"]["scale"] == expected["scaler"]["scale"] / 2
    run.train(6)
    assert run.seen[-1][3] is False
    assert not same(run.state()["weights"], expected["weights"])
    assert all(bool(p.isfinite().all()) for p in run.layers.parameters())
    run.close()


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed offload"])
def test_nan_in_every_batch_from_a_step_on_ends_the_run_where_that_is_asked(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning after a third of ``max_consecutive_skips``, the error one window after all."""
    before = Run(mode).train(4)
    expected = before.state()
    before.close()
    run = Spoiled(mode, 4, 1000, max_consecutive_skips=6)
    with pytest.raises(OverflowStreakError) as caught:
        run.train(100)
    assert run.progress.window == 4 + 6
    (warned,) = [text for text in told(caplog) if "in a row" in text]
    assert "2 windows in a row overflowed" in warned
    began = [text for text in told(caplog) if text.startswith("window 4 overflowed: ")]
    assert len(began) == 1
    assert "look at the data" in began[0]
    assert "7 windows in a row" in str(caught.value)
    assert same(run.state()["weights"], expected["weights"])
    run.close()


def test_nan_in_every_batch_from_a_step_on_is_told_where_nothing_was_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Spoiled("overlap", 4, 1000, min_scale=1.0).train(4 + WARNS_AT - 1)
    assert told(caplog) == []
    run.train(4 + WARNS_AT)
    (text,) = told(caplog)
    assert f"{WARNS_AT} windows in a row overflowed" in text
    assert "nothing ends this run" in text
    assert "0.weight" in text
    run.close()


def test_an_infinite_loss_from_the_first_step_is_told_three_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Scale below 1 after 17 windows, the run after 30 and 300."""
    loop, when = Loop(), {}
    for number in range(1, 301):
        assert not loop.window(1.0, INF)
        for text in told(caplog)[len(when) :]:
            when[text] = number
    below, run, again = when
    assert [when[text] for text in (below, run, again)] == [17, WARNS_AT, 300]
    assert "the loss scale fell below 1" in below
    assert "The scale is now 6.10352e-05" in run
    assert "300 windows in a row" in again
    assert loop.layer.moved == 0
    # It said so: a finite loss does not bring it back, as it would not with torch's scaler.
    assert not loop.window(1.0)
    assert loop.layer.moved == 0
    loop.close()


def test_a_scale_of_zero_in_a_checkpoint_is_refused_or_raised_to_the_floor() -> None:
    """Every window of a run that begins with it would be skipped."""
    dead = torch.amp.GradScaler("cpu", init_scale=1.0).state_dict() | {"scale": 0.0}
    ours = GradScaler("cpu", init_scale=8.0)
    with pytest.raises(ConfigError, match=r"scale=0\.0, expected a number > 0.*set min_scale"):
        ours.load_state_dict(dead)
    assert ours.get_scale() == 8.0
    floor = GradScaler("cpu", min_scale=2.0)
    floor.load_state_dict(dead)
    assert floor.get_scale() == 2.0


@pytest.mark.parametrize("first", [2.0**126, 2.0**127, LARGEST])
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_a_scale_that_would_pass_float32_stays_the_last_one_that_does_not(
    mode: str, first: float
) -> None:
    """Growth past it is left out, at every window here; training is what it was."""
    tiny = 2.0**-120
    loop = Loop(init_scale=first, growth_interval=1, step_mode=mode)
    reference = Loop(stock)
    reference.accelerator.scaler.load_state_dict(
        torch.amp.GradScaler("cpu", init_scale=first, growth_interval=1).state_dict()
    )
    for _ in range(20):
        assert loop.window(tiny)
        reference.window(tiny)
        assert loop.scale == reference.scale == max(2.0**127, first)
    loop.optimizer.synchronize()
    assert torch.equal(loop.layer.w, reference.layer.w)
    loop.close()


@pytest.mark.parametrize("raw", [False, True], ids=["Accelerate", "a plain loop"])
def test_ten_thousand_skips_in_a_row_are_three_lines_and_no_memory(
    raw: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At 30, 300 and 3,000; then the first finite loss trains on as if nothing had been."""
    if raw:
        scaler, layer = GradScaler("cpu", min_scale=1.0), Linear()
        optimizer = torch.optim.SGD(layer.parameters(), lr=LR)

        def window(factor: float) -> None:
            scaler.scale(layer(1.0) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    else:
        loop = Loop(min_scale=1.0)
        scaler, layer = loop.accelerator.scaler, loop.layer

        def window(factor: float) -> None:
            loop.window(1.0, factor)

    live = []
    half = 2000 if raw else 5000
    for _ in range(2):
        for _ in range(half):
            window(INF)
        gc.collect()
        live.append(len(gc.get_objects()))
    assert live[1] - live[0] < 100, live
    assert [text.split()[0] for text in told(caplog)] == ["30", "300", "3000"]
    assert "Parameters are as before the run" in told(caplog)[-1]
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict()["_consecutive_skips"] == 2 * half
    assert layer.moved == 0
    window(1.0)
    assert layer.moved == 1.0
    for _ in range(WARNS_AT):
        window(INF)
    assert told(caplog)[-1].startswith("30 windows in a row"), "a second run is told of as well"
    if not raw:
        loop.close()
