"""bfloat16 parameters under fp16 autocast, attached, beside a plain loop with float32 masters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attached import cpu
from references import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    NEVER_STALE,
    OPTIMIZERS,
    assert_same_run,
    loss_of,
    network,
    run_reference,
    saved_of,
)
from support import reset
from torch import Tensor, nn

from accel_scaler import attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

BRAIN = torch.bfloat16
MICRO = 3


def brain() -> nn.Module:
    return network(BRAIN)


@pytest.fixture
def kernel_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch's check takes none."""
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def checked(grads: list[Tensor], *rest: Any) -> None:
        assert all(grad.dtype is not BRAIN for grad in grads)
        kernel(grads, *rest)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", checked)


@pytest.mark.usefixtures("kernel_without_bfloat16")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("mode", "offload"), itertools.product(("sync", "overlap", "delayed"), ("none", "cpu"))
)
def test_attached_they_train_as_a_loop_with_masters(mode: str, offload: str, kind: str) -> None:
    reset()
    accelerator = attach(
        cpu(),
        step_mode=mode,
        offload=offload,
        init_scale=INIT_SCALE,
        growth_interval=GROWTH_INTERVAL,
        delay_compensation="none",
    )
    net = brain()
    model, optimizer = accelerator.prepare(net, OPTIMIZERS[kind](net.parameters()))
    seen: dict[str, Any] = {"losses": [], "scales": []}
    for step in range(12):
        for micro in range(MICRO):
            accelerator.gradient_state._set_sync_gradients(micro == MICRO - 1)
            loss = loss_of(model, step * MICRO + micro, step in (0, 5))
            accelerator.backward(loss / MICRO)
            seen["losses"].append(str(float(loss.detach())))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        optimizer.zero_grad()
        seen["scales"].append(accelerator.scaler.get_scale())
    seen |= saved_of(net, optimizer.state_dict())
    detach(accelerator)
    prompt = 0 if mode == "delayed" else NEVER_STALE
    more = {"max_norm": 0.5, "micro": MICRO, "autocast": True}
    assert_same_run(seen, run_reference(kind, prompt, make=brain, **more))
