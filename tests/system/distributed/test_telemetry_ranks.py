"""Telemetry of two gloo ranks: who writes, and what rank 0 says of an overflow on rank 1."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from children import RANKS, everywhere, on_two_ranks
from support import mlp, weights
from telemetry_runs import lines_of, windows_of
from torch import nn

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.report.reader import read_run
from accel_scaler.report.summary import find as find_all
from accel_scaler.telemetry import verdict

WINDOWS = 5
OVERFLOW = 2
"""The window that overflows, on rank 1 only."""
SKIPPED = [window == OVERFLOW for window in range(WINDOWS)]


def train(telemetry: Path | None, mode: Any) -> list[float]:
    """The norms that the clip returned, then the weights."""
    accelerator: Any = attach(
        Accelerator(cpu=True, mixed_precision="fp16"),
        ScalerConfig(
            init_scale=1024.0,
            step_mode=mode,
            telemetry=None if telemetry is None else str(telemetry),
            find_overflow="always",
        ),
    )
    plain = mlp()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rank, norms = accelerator.process_index, []
    for window in range(WINDOWS):
        generator = torch.Generator().manual_seed(10 * window + rank)
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)
        loss = nn.functional.mse_loss(model(x).float(), y)
        if (window, rank) == (OVERFLOW, 1):
            loss = loss * float("inf")
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    detach(accelerator)
    accelerator.wait_for_everyone()
    return [*norms, *weights(plain).tolist()]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_rank_0_writes_and_with_its_place_in_the_path_each_rank(mode: str, tmp_path: Path) -> None:
    def body() -> None:
        off = train(None, mode)
        for name in (f"{mode}.jsonl", f"{mode}_{{rank}}.jsonl"):
            assert train(tmp_path / name, mode) == off  # on the rank that writes, and beside it
        one, other = everywhere(off)
        assert one == other
        torch.save(off[:WINDOWS], tmp_path / "norms.pt")

    on_two_ranks(body, tmp_path)
    files = {f"{mode}{end}.jsonl" for end in ("", *(f"_{rank}" for rank in range(RANKS)))}
    assert {p.name for p in tmp_path.glob("*.jsonl")} == files
    norms = torch.load(tmp_path / "norms.pt")
    for name, rank in ((mode, 0), (f"{mode}_0", 0), (f"{mode}_1", 1)):
        start, *_, end = lines_of(tmp_path / f"{name}.jsonl")
        assert (start["rank"], start["ranks"]) == (rank, RANKS)
        assert (end["kind"], end["error"]) == ("end", None)
        found = windows_of(tmp_path / f"{name}.jsonl")
        assert [line["found_inf"] for line in found] == SKIPPED
        assert [line["skipped"] for line in found] == SKIPPED
        assert [line["scale"] for line in found] == [1024.0] * 3 + [512.0] * 2
        # DDP has summed the gradients: rank 0 sees what they are.
        assert [bool(line.get("overflowed")) for line in found] == SKIPPED
        # The loss of rank 1 was bad, and that is the run's.
        assert [line.get("loss_nonfinite", 0) for line in found] == list(map(int, SKIPPED))
        for line, norm in zip(found, norms, strict=True):
            assert line["grad_norm"] in ((None, "inf") if line["skipped"] else (norm,))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("find", ["auto", "replay"])
def test_what_rank_1_saw_rank_0_says_in_log_and_report(
    precision: str, find: Any, tmp_path: Path
) -> None:
    """A NaN in its batch; by default the module is not searched for, but the loss is known."""

    def body() -> None:
        logging.getLogger("accel_scaler").addHandler(logging.StreamHandler(sys.stdout))
        path = tmp_path / "run.jsonl"
        scale: Any = {"init_scale": 1024.0} if precision == "fp16" else {}
        accelerator: Any = attach(
            Accelerator(cpu=True, mixed_precision=precision),
            ScalerConfig(
                telemetry=str(path) if find == "replay" else None, find_overflow=find, **scale
            ),
        )
        plain = mlp()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for window in range(10):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(window))
            if (window, accelerator.process_index) == (OVERFLOW, 1):
                x[0] = float("nan")
            accelerator.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        bad = [r.loss_nonfinite for r in accelerator.scaler_history.records]
        assert bad == [int(window == OVERFLOW) for window in range(10)]
        detach(accelerator)

    on_two_ranks(body, tmp_path)
    first, other = ((tmp_path / f"rank{rank}.txt").read_text() for rank in range(RANKS))
    (said,) = [line for line in first.splitlines() if "With a problem: 10 steps, " in line]
    assert f"1 step (step {OVERFLOW})" in said
    assert "With a problem" not in other
    where = [line for line in (first + other).splitlines() if f"step {OVERFLOW} skipped: " in line]
    assert len(where) == (find == "replay")
    if where:
        run = read_run(tmp_path / "run.jsonl")
        for text in (where[0], said, verdict(run, is_file=True)):
            assert "(rank 1)" in text
        assert find_all(run)[0].level == "bad"
