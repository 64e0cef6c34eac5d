"""Tensor and sequence parallelism: partial gradients, and ranks that must agree on a skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from children import RANKS, everywhere, in_child, on_two_ranks
from support import reset
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from two_ranks import weights, whole
from versions import release

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach

STEPS = 6
OVERFLOW = 2
"""The window in which one element of rank 1's shard becomes inf."""
SCALE = 1024.0
ROUNDED = {"rtol": 1e-6 if release("torch") < (2, 7) else 2.4e-7, "atol": 0.0}
"""float32's last bits differ between processors, by how a row is cut for their vectors. torch 2.6
leaves a norm over shards to be summed up, in another order than one process does."""


class Net(nn.Module):
    """``norm`` is replicated, and under sequence parallelism its gradient a partial sum."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(5)
        norm, out = torch.rand(8, generator=seeded) + 0.5, torch.randn(8, 4, generator=seeded)
        self.mesh = mesh
        if mesh is not None:
            norm = distribute_tensor(norm, mesh, [Replicate()])
            out = distribute_tensor(out, mesh, [Shard(1)])
        self.norm, self.out = nn.Parameter(norm), nn.Parameter(out)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return ((x * self.norm) @ self.out).square().sum()
        rows: Any = distribute_tensor(x, self.mesh, [Shard(0)])
        hidden = (rows * self.norm).redistribute(self.mesh, [Replicate()])
        loss: Any = (hidden @ self.out).square().sum()
        whole: Tensor = loss.full_tensor()
        return whole


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def alone(clip: bool) -> tuple[Tensor, list[float]]:
    """One process, plain torch."""
    model = Net(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    norms = []
    for step in range(STEPS):
        scaler.scale(model(batch(step))).backward()
        if step == OVERFLOW:
            model.out.grad[0, -1] = float("inf")  # type: ignore[index]
        if clip:
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(model.parameters()), norms


def shared_out(mode: Any, clip: bool, attached: bool) -> tuple[Tensor, list[float]]:
    model: Any = Net(init_device_mesh("cpu", (RANKS,)))
    inner = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.5)
    accelerator: Any = None
    optimizer: Any
    if attached:
        config = ScalerConfig(init_scale=SCALE, step_mode=mode)
        accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        accelerator.native_amp = False
        optimizer, scaler = accelerator.prepare(inner), accelerator.scaler
    else:
        scaler = GradScaler("cpu", init_scale=SCALE)
        optimizer = AsyncOptimizer(inner, model, scaler=scaler, step_mode=mode)
    norms = []
    for step in range(STEPS):
        scaler.scale(model(batch(step))).backward()
        assert any(placement.is_partial() for placement in model.norm.grad.placements)
        if step == OVERFLOW and dist.get_rank() == 1:
            model.out.grad.to_local()[0, -1] = float("inf")
        if clip and attached:
            norms.append(float(whole(accelerator.clip_grad_norm_(model.parameters(), 0.5))))
        elif clip:
            norms.append(float(whole(optimizer.clip_grad_norm_(0.5))))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert scaler.get_scale() == SCALE / 2
    assert torch.equal(*everywhere(model.norm.to_local().detach()))  # the replicated one stays one
    if attached:
        detach(accelerator)
    else:
        optimizer.close()
    return weights(model.parameters()), norms


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_two_ranks_train_as_one_process_does(mode: str, clip: bool, tmp_path: Path) -> None:
    """An overflow in rank 1's shard is skipped by both."""

    def body() -> None:
        expected, norms = alone(clip)
        for attached in (False, True):
            found, its_norms = shared_out(mode, clip, attached)
            torch.testing.assert_close(found, expected)
            if clip:
                assert its_norms.pop(OVERFLOW) == float("inf")
                finite = norms[:OVERFLOW] + norms[OVERFLOW + 1 :]
                torch.testing.assert_close(its_norms, finite, **ROUNDED)

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("sharded", [True, False])
def test_who_shards_by_himself_says_so(sharded: bool, tmp_path: Path) -> None:
    """Nothing in plain tensors shows it; ``sharded=True`` makes the ranks agree."""

    def body() -> None:
        p = nn.Parameter(torch.ones(3))
        scaler = GradScaler("cpu", init_scale=SCALE)
        inner = torch.optim.SGD([p], lr=0.125)
        with AsyncOptimizer(inner, scaler=scaler, step_mode="sync", sharded=sharded) as optimizer:
            scaler.scale((p * (float("inf") if dist.get_rank() == 1 else 1.0)).sum()).backward()
            optimizer.step()
            assert optimizer.step_was_skipped is (sharded or dist.get_rank() == 1)
            assert not sharded or scaler.get_scale() == SCALE / 2

    on_two_ranks(body, tmp_path)


def test_an_overflow_beside_shards_is_one_for_all(tmp_path: Path) -> None:
    """In a parameter that is no DTensor, on rank 1 alone: that others are tells that it may."""

    def body() -> None:
        model, plain = Net(init_device_mesh("cpu", (RANKS,))), nn.Parameter(torch.ones(3))
        scaler = GradScaler("cpu", init_scale=SCALE)
        inner = torch.optim.SGD([*model.parameters(), plain], lr=0.125)
        with AsyncOptimizer(inner, model, scaler=scaler, step_mode="sync") as optimizer:
            factor = float("inf") if dist.get_rank() == 1 else 1.0
            scaler.scale(model(batch(0)) + (plain * factor).sum()).backward()
            optimizer.step()
            assert optimizer.step_was_skipped
            assert scaler.get_scale() == SCALE / 2

    on_two_ranks(body, tmp_path)


class Beside(nn.Module):
    """DTensors and a plain parameter, as ``parallelize_module`` leaves them."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.net, self.plain = Net(mesh), nn.Parameter(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x) + 100 * self.plain.square().sum()
        return loss


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
def test_norms_of_shards_beside_a_plain_parameter(precision: str, tmp_path: Path) -> None:
    """Before the last micro-batch, and of a spike, where nothing is clipped."""

    def train(mesh: DeviceMesh | None, **settings: Any) -> tuple[Tensor, list[float], list[bool]]:
        reset()
        config = settings | ({"init_scale": SCALE} if precision == "fp16" else {})
        accelerator: Any = attach(Accelerator(mixed_precision=precision), **config)
        model, norms, skips = Beside(mesh), [], []
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1e-5))
        for step in range(STEPS):
            for is_last in (False, True):
                accelerator.gradient_state._set_sync_gradients(is_last)
                accelerator.backward(model(batch(2 * step + is_last)))
                if not is_last and precision == "fp16":  # elsewhere this clips, as in stock
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            skips.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        detach(accelerator)
        return weights(model.parameters()), norms, skips

    def body() -> None:
        model, norms = Beside(None), []
        for step in range(STEPS):
            (model(batch(2 * step)) + model(batch(2 * step + 1))).backward()
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            model.zero_grad()
        limit = sorted(norms)[STEPS // 2]
        found = train(init_device_mesh("cpu", (RANKS,)), skip_norm_above=limit)
        expected = train(None, skip_norm_above=limit)
        assert found[2] == expected[2]
        assert set(found[2]) == {True, False}
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], **ROUNDED | {"rtol": 1e-6})

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_trainer_clips_gradients_on_two_meshes_unscaled(precision: str, tmp_path: Path) -> None:
    """transformers 5.24 does that by itself, while they are scaled, and without a guard."""

    def train(mesh: DeviceMesh | None, bad: int = -1) -> tuple[Tensor, list[float], list[bool]]:
        reset()
        model, norms = Beside(mesh), []

        class Norms(TrainerCallback):  # type: ignore[misc]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
                if "grad_norm" in logs:
                    norms.append(logs["grad_norm"])

        def compute_loss(model: Any, inputs: Any, **_: Any) -> Tensor:
            loss: Tensor = model(inputs["x"][0])
            return loss * 1e4 if trainer.state.global_step == bad else loss

        arguments = TrainingArguments(
            str(tmp_path / "run"),
            use_cpu=True,
            max_steps=STEPS,
            max_grad_norm=4.0,
            per_device_train_batch_size=1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            lr_scheduler_type="constant",
            bf16=precision == "bf16",
        )
        trainer: Any = Trainer(
            model,
            arguments,
            train_dataset=[{"x": batch(step)} for step in range(STEPS)],
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
            callbacks=[Norms()],
        )
        trainer.compute_loss = compute_loss
        if precision == "fp16":
            trainer.accelerator.state._mixed_precision = "fp16"
        settings = {"init_scale": 8.0} if precision == "fp16" else {}
        attach(trainer, skip_norm_above=1e6, **settings)
        trainer.train()
        skips = [r.skipped for r in trainer.accelerator.scaler_history.records]
        return weights(model.parameters()), norms, skips

    def body() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found, expected = train(init_device_mesh("cpu", (1,)), bad=3), train(None, bad=3)
        assert found[2] == expected[2] == [step == 3 for step in range(STEPS)]
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], **ROUNDED | {"rtol": 1e-6})

    output = tmp_path / "out.txt"
    assert in_child(body, output) == 0, output.read_text()
