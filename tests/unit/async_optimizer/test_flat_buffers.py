"""The quick way for thousands of small tensors computes what the other way computes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from places import ROOT
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer.flat_buffers import SmallSteps
from accel_scaler.async_optimizer.master_params import make_pairs
from accel_scaler.async_optimizer.streams import SideStreams
from accel_scaler.scaling.deferred_unscale import DeferredUnscale

SIZES = [(7,), (3, 5), (1,), (33,), (8, 4, 2), (1000,)] * 5
HOST = SideStreams(torch.device("cpu"))


def parameters(**kwargs: Any) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator, **kwargs)) for size in SIZES]


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Neighbours in different groups, as decay and no decay."""
    return [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}]


def train(quick: bool, monkeypatch: pytest.MonkeyPatch, missing: bool, clip: float) -> list[Tensor]:
    if not quick:
        monkeypatch.setattr(SmallSteps, "suits", lambda pairs, streams: False)
    params = parameters()
    inner = torch.optim.AdamW(two_groups(params), lr=0.01, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
    used = 0
    begin = SmallSteps.begin

    def counting(self: SmallSteps, grads: list[Tensor], deferred: DeferredUnscale) -> bool:
        nonlocal used
        used += 1
        return begin(self, grads, deferred)

    with monkeypatch.context() as patch, AsyncOptimizer(inner, scaler=scaler) as optimizer:
        patch.setattr(SmallSteps, "begin", counting)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            scale = scaler.get_scale()
            scaler.scale(torch.ones(()))
            for place, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=generator) * scale
                if missing and step % 4 == 3 and place % 3 == 0:
                    p.grad = None
                elif p.dim() == 2:  # a gradient laid out unlike its parameter (fault F10)
                    p.grad = p.grad.t().contiguous().t()
            if step == 5:
                params[4].grad = torch.full_like(params[4], float("inf"))
            optimizer.clip_grad_norm_(clip)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        if quick:
            assert used >= (6 if missing else 10)
    flat = [value for entry in state.values() for value in entry.values()]
    return [p.detach() for p in params] + flat


@pytest.mark.parametrize("missing", [False, True], ids=["all gradients", "some missing"])
@pytest.mark.parametrize("clip", [0.5, 1e9], ids=["clipped", "not clipped"])
def test_parameters_and_state_are_bit_for_bit_those_of_the_other_way(
    monkeypatch: pytest.MonkeyPatch, missing: bool, clip: float
) -> None:
    quick = train(True, monkeypatch, missing, clip)
    other = train(False, monkeypatch, missing, clip)
    assert len(quick) == len(other) == 4 * len(SIZES)
    for mine, reference in zip(quick, other, strict=True):
        assert torch.equal(mine, reference)


def test_a_gradient_of_another_size_is_not_taken() -> None:
    params = parameters()
    inner = torch.optim.AdamW(params, lr=0.01, fused=True)
    with AsyncOptimizer(inner) as optimizer:
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        optimizer.synchronize()
        replica = optimizer._stepper.replica
        small = replica.small_steps()
        assert small is not None
        grads = [torch.ones_like(p) for p in replica.params]
        steps = [float(inner.state[p]["step"]) for p in params]
        assert small.begin([*grads[:-1], grads[-1][:1]], DeferredUnscale()) is False
        assert [float(inner.state[p]["step"]) for p in params] == steps


@pytest.mark.parametrize("unsuited", ["large", "master", "expanded", "none"])
def test_only_small_dense_parameters_in_place_are_suited(unsuited: str) -> None:
    params = parameters()
    if unsuited == "large":
        params.append(nn.Parameter(torch.zeros(1 << 13)))
    if unsuited == "expanded":
        params.append(nn.Parameter(torch.zeros(1).expand(4)))
    inner = torch.optim.AdamW(params, fused=True)
    offload = "cpu" if unsuited == "master" else "none"
    with AsyncOptimizer(inner, offload=offload) as optimizer:
        pairs = optimizer._stepper.replica.ordered
        assert SmallSteps.suits(pairs, HOST) is (unsuited == "none")


@pytest.mark.process
def test_the_overlap_benchmark_runs() -> None:
    script = ROOT / "benchmarks" / "overlap.py"
    done = subprocess.run(
        [sys.executable, str(script), "--case", "2000 x 1000", "--repeats", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for row in ("waits for a device", "small eager operations", "runs Python"):
        assert row in done.stdout


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_parameters_in_host_memory_take_the_quick_way(device: str) -> None:
    """Its buffers are there. Tensors of ``meta`` stand in for those of a device with one queue."""
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, device=device))], fused=True)
    pairs = make_pairs(inner, HOST, offload=False, masters=False, known=())
    assert SmallSteps.suits(pairs, HOST) == (device == "cpu")
