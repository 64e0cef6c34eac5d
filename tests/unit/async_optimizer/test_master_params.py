"""float16 parameters train through float32 masters: every mode, with and without offload."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from references import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    NEVER_STALE,
    OPTIMIZERS,
    assert_same_run,
    loss_of,
    network,
    run_ours,
    run_reference,
    same,
    saved_of,
)
from torch import Tensor, nn

from accel_scaler import (
    AsyncOptimizer,
    GradScaler,
    ScalerConfig,
    UnsupportedError,
    attach,
    detach,
)

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

HALF, BRAIN = torch.float16, torch.bfloat16
WAYS = list(itertools.product(("sync", "overlap", "delayed"), ("none", "cpu")))
TWO_WAYS = [("sync", "none"), ("delayed", "cpu")]


def half() -> nn.Module:
    return network(HALF)


def late(mode: str) -> int:
    """How many updates of the reference are not."""
    return 0 if mode == "delayed" else NEVER_STALE


def test_our_scaler_on_a_plain_optimizer_names_the_remedy() -> None:
    model = half()
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(UnsupportedError, match="AsyncOptimizer"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("mode", "offload"), WAYS)
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_float16_parameters_train_as_the_reference(kind: str, mode: str, offload: str) -> None:
    ours = run_ours(kind, mode, offload, make=half)
    assert_same_run(ours, run_reference(kind, late(mode), make=half))


def test_the_master_holds_what_the_parameter_cannot() -> None:
    ours = run_ours("sgd", "sync", make=half)
    for p, master in zip(ours["params"], ours["masters"], strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(master.half(), p)
        assert not torch.equal(master, p.float())


def test_clipping_some_parameters_leaves_the_others() -> None:
    """Some of an optimizer's: they are clipped in float16, still scaled: one rounding of it."""
    model, plain = half(), half()
    chosen = [0, 3]
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with AsyncOptimizer(inner, model, scaler=scaler, mode="sync") as optimizer:
        before = [p.detach().float().clone() for p in model.parameters()]
        scaler.scale(loss_of(model, 0)).backward()
        params = list(model.parameters())
        norm = optimizer.clip_grad_norm_(0.01, parameters=[params[i] for i in chosen])
        optimizer.step()
        state = optimizer.state_dict()["state"]
    after = [state[i]["master"] for i in range(len(before))]
    (loss_of(plain, 0) * INIT_SCALE).backward()
    grads = [p.grad.float() / INIT_SCALE for p in plain.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm([grads[i] for i in chosen])
    assert float(norm) == pytest.approx(float(total), rel=1e-6)
    assert float(total) > 0.01
    for i, (new, grad) in enumerate(zip(after, grads, strict=True)):
        if i in chosen:
            wanted = grad * (0.01 / (total + 1e-6))
            torch.testing.assert_close(before[i] - new, wanted, rtol=2.0**-10, atol=2e-7)
        else:
            assert torch.equal(new, before[i] - grad)


def attached(mode: str = "sync", offload: str = "none", **settings: Any) -> Any:
    config = ScalerConfig(
        step_mode=mode,  # type: ignore[arg-type]
        offload=offload,  # type: ignore[arg-type]
        init_scale=INIT_SCALE,
        growth_interval=GROWTH_INTERVAL,
        **settings,
    )
    return attach(Accelerator(cpu=True, mixed_precision="fp16"), config)


def test_clip_grad_value_clips_the_unscaled_value() -> None:
    """A limit that float16 holds (2**-4) is met exactly."""
    accelerator = attached("overlap")
    net = half()
    model, optimizer = accelerator.prepare(net, OPTIMIZERS["sgd"](net.parameters()))
    seen: dict[str, Any] = {"losses": [], "scales": []}
    for step in range(12):
        loss = loss_of(model, step, step in (0, 5))
        accelerator.backward(loss)
        seen["losses"].append(str(float(loss.detach())))
        accelerator.clip_grad_value_(model.parameters(), 2.0**-4)
        optimizer.step()
        optimizer.zero_grad()
        seen["scales"].append(accelerator.scaler.get_scale())
    seen.update(saved_of(net, optimizer.state_dict()))
    detach(accelerator)
    clipped = run_reference("sgd", make=half, autocast=True, max_value=2.0**-4)
    assert_same_run(seen, clipped)
    free = run_reference("sgd", make=half, autocast=True)
    assert not same(free["params"], clipped["params"])


def test_unscaling_float16_gradients_in_place_is_refused_with_the_remedy() -> None:
    accelerator = attached("sync")
    net = half()
    model, optimizer = accelerator.prepare(net, OPTIMIZERS["sgd"](net.parameters()))
    accelerator.backward(loss_of(model, 0))
    with pytest.raises(UnsupportedError, match="clip_grad_norm_"):
        accelerator.unscale_gradients()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert not same([p.detach() for p in net.parameters()], before)
    detach(accelerator)


def of_two(w: Tensor, b: Tensor, step: int) -> Tensor:
    return ((w + 0.125 * step) * b.float()).square().sum()


UNFROZEN = range(3, 8)
"""Steps at which the float16 parameter is trained."""


def unfrozen_by_hand(steps: int) -> list[list[Tensor]]:
    """Float32 beside float16 that is trained for a while, in a plain loop with a master."""
    w, b = nn.Parameter(torch.linspace(0.5, 1.0, 4)), nn.Parameter(torch.ones(4, dtype=HALF))
    master = nn.Parameter(b.detach().float())
    optimizer, seen = torch.optim.SGD([w, master], lr=1e-3, momentum=0.9), []
    for step in range(steps):
        b.requires_grad_(step in UNFROZEN)
        (of_two(w, b, step) * INIT_SCALE).backward()
        assert w.grad is not None
        w.grad /= INIT_SCALE
        master.grad = None if b.grad is None else b.grad.float() / INIT_SCALE
        optimizer.step()
        b.data.copy_(master.data)
        w.grad = b.grad = None
        seen.append([w.detach().clone(), b.detach().clone()])
    return seen


@pytest.mark.parametrize(("late", "clips"), [(False, True), (True, False)])
@pytest.mark.parametrize(("mode", "offload"), TWO_WAYS)
def test_a_float16_parameter_unfrozen_later_trains_as_the_reference(
    mode: str, offload: str, late: bool, clips: bool
) -> None:
    accelerator = attached(mode, offload, delay_warmup_steps=100, max_scale=INIT_SCALE)
    w, b = nn.Parameter(torch.linspace(0.5, 1.0, 4)), nn.Parameter(torch.ones(4, dtype=HALF))
    b.requires_grad_(False)
    optimizer = accelerator.prepare(torch.optim.SGD([w] if late else [w, b], lr=1e-3, momentum=0.9))
    seen = []
    for step in range(10):
        if late and step == UNFROZEN.start:
            optimizer.optimizer.add_param_group({"params": [b]})
        b.requires_grad_(step in UNFROZEN)
        accelerator.backward(of_two(w, b, step))
        if clips:
            accelerator.clip_grad_norm_([w, b], 1e6)
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.step_was_skipped
        optimizer.synchronize()
        seen.append([w.detach().clone(), b.detach().clone()])
    detach(accelerator)
    for ours, plain in zip(seen, unfrozen_by_hand(10), strict=True):
        assert all(map(torch.equal, ours, plain))
    assert not torch.equal(seen[-1][1], torch.ones(4, dtype=HALF))


# Masters follow what is written to the model's parameters, whenever that happens.

EDITED = [
    ("overlap", "cpu", 0),
    ("delayed", "none", 3),
    ("delayed", "cpu", 0),
    ("sync", "cpu", 0),
]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))


def write(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


def step_by_one(model: nn.Module, optimizer: AsyncOptimizer) -> None:
    """With gradients of 1: SGD takes the learning rate off each element."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def elements(model: nn.Module) -> list[float]:
    all_of_them: Tensor = torch.cat([p.detach().flatten() for p in model.parameters()])
    return sorted(set(all_of_them.tolist()))


@pytest.mark.parametrize(("mode", "offload", "warmup"), EDITED)
def test_an_edit_after_any_step_is_what_is_stepped_next(
    mode: str, offload: str, warmup: int
) -> None:
    """During the warm-up of ``delayed`` too."""
    model = two_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    with AsyncOptimizer(
        inner, model, mode=mode, offload=offload, delay_warmup_steps=warmup
    ) as optimizer:
        for number in range(5):
            optimizer.synchronize()
            write(model, 10.0 * number)
            step_by_one(model, optimizer)
        optimizer.synchronize()
        assert elements(model) == [39.75]
