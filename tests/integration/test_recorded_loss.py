"""The loss on record: what a loop computes beside it, micro-batches, skips, who throws away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp
from telemetry_runs import MODES, attached, loss_of, sgd, windows_of
from torch.utils.data import DataLoader, TensorDataset

from accel_scaler.scaling import Losses

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_MODES = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def recorded(path: Path) -> list[Any]:
    return [line.get("loss") for line in windows_of(path)]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_it_is_the_mean_of_what_the_loop_computes_to_the_odd_end_of_each_epoch(
    tmp_path: Path, accumulation: int, precision: str
) -> None:
    path, means, present = tmp_path / "run.jsonl", [], []
    with attached(path, precision, accumulation) as accelerator:
        data = DataLoader(TensorDataset(torch.randn(20, 8), torch.randn(20, 1)), batch_size=4)
        plain = mlp()
        model, optimizer, data = accelerator.prepare(plain, sgd(plain.parameters()), data)
        for _ in range(2):
            for x, y in data:
                with accelerator.accumulate(model):
                    loss = (model(x).float() - y).square().mean()
                    accelerator.backward(loss)
                    present.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    means.append(sum(present) / len(present))
                    present.clear()
    assert len(means) == (10 if accumulation == 1 else 4)
    assert recorded(path) == pytest.approx(means, rel=1e-6)
    if accumulation == 1:
        assert recorded(path) == means


@ALL_MODES
def test_one_that_comes_late_is_in_memory_with_the_next_window(
    tmp_path: Path, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, where nobody waits for it before the update."""
    monkeypatch.setattr(Losses, "is_there", False)
    path, losses, kept = tmp_path / "run.jsonl", [], []
    with attached(path, **mode) as accelerator:
        plain = mlp()
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        for number in range(6):
            loss = loss_of(model, number)
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            kept.append([record.loss for record in accelerator.scaler_history.records])
    assert kept == [[*losses[:number], None] for number in range(6)]
    assert recorded(path) == losses


def test_a_window_that_is_run_again_has_its_loss_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with attached(path, accumulation=2, heal=True, find_overflow="replay") as accelerator:
        plain = mlp()
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        expected = []
        for number in range(8):
            with accelerator.accumulate(model):
                loss = loss_of(model, number)
                if number == 4:  # finite; its gradients overflow
                    loss = loss * 1e30
                accelerator.backward(loss)
                expected.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    means = [sum(pair) / 2 for pair in zip(expected[::2], expected[1::2], strict=True)]
    assert [line["skipped"] for line in windows_of(path)] == [False, False, True, False]
    assert recorded(path) == pytest.approx(means, rel=1e-6)


def test_two_losses_of_one_window_are_their_sum_and_by_hand_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with attached(path) as accelerator:
        first, second = mlp(), mlp()
        model, optimizer = accelerator.prepare(first, sgd(first.parameters()))
        other, another = accelerator.prepare(second, sgd(second.parameters()))
        one, two = loss_of(model, 0), loss_of(other, 1)
        accelerator.backward(one)
        accelerator.backward(two)
        optimizer.step()
        another.step()
        optimizer.zero_grad()
        another.zero_grad()
        by_hand = [loss_of(model, 2), loss_of(model, 3)]
        torch.autograd.backward(accelerator.scaler.scale(by_hand))
        optimizer.step()
        optimizer.zero_grad()
        twice = loss_of(model, 4)
        accelerator.backward(twice, retain_graph=True)
        accelerator.backward(twice)
        optimizer.step()
        optimizer.zero_grad()
    expected = [one + two, by_hand[0] + by_hand[1], 2 * twice]
    assert recorded(path) == pytest.approx([float(each.detach()) for each in expected], rel=1e-6)
