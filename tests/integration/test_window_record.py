"""One record of a window: the step uses what any entry point has unscaled, clipped or found.

Each run has plain torch, or stock Accelerate, beside it. SGD shows a wrong scale at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from support import LR, Linear, mlp, stock, weights
from torch import Tensor, nn
from torch.optim import SGD

from accel_scaler import AsyncOptimizer, GradScaler, OrderError, ScalerConfig, attach, detach
from accel_scaler.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
SCALE = 1024.0


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    torch.manual_seed(step)
    loss: Tensor = model(torch.randn(4, 8)).float().square().mean() * factor
    return loss


def attached(mode: str = "sync", init_scale: float = SCALE, **settings: Any) -> Any:
    return attach(
        Accelerator(cpu=True, mixed_precision="fp16"),
        ScalerConfig(init_scale=init_scale, step_mode=mode, **settings),  # type: ignore[arg-type]
    )


class Loop:
    """A model with its scaler and optimizer, by hand or under Accelerate."""

    def __init__(self, face: str, mode: str) -> None:
        self.model: Any = mlp()
        self.inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accelerator: Any = None
        if face == "accelerate":
            self.accelerator = attached(mode)
            self.accelerator.native_amp = False  # the numbers of float32: only scaling is meant
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.inner)
            self.scaler = self.accelerator.scaler
        else:
            self.scaler = GradScaler("cpu", init_scale=SCALE)
            self.optimizer = AsyncOptimizer(
                self.inner, self.model, scaler=self.scaler, step_mode=mode
            )

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def backward(self, step: int, factor: float = 1.0) -> None:
        loss = loss_of(self.model, step, factor)
        if self.accelerator is None:
            self.scaler.scale(loss).backward()
        else:
            self.accelerator.backward(loss)

    def clip(self, max_norm: float) -> float:
        if self.accelerator is None:
            return float(self.optimizer.clip_grad_norm_(max_norm))
        return float(self.accelerator.clip_grad_norm_(self.parameters, max_norm))

    def close(self) -> None:
        if self.accelerator is None:
            self.optimizer.close()
        else:
            detach(self.accelerator)


@contextmanager
def loop(face: str, mode: str) -> Iterator[Loop]:
    made = Loop(face, mode)
    try:
        yield made
        made.optimizer.synchronize()
    finally:
        made.scaler.abandon_window()
        made.close()


faces = pytest.mark.parametrize(
    ("face", "mode"), [("accelerate", "sync"), ("accelerate", "overlap"), ("by hand", "overlap")]
)
modes = pytest.mark.parametrize("mode", ["sync", "overlap"])


class Plain:
    """The same by hand, with torch's scaler."""

    def __init__(self) -> None:
        self.model = mlp()
        self.inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def window(self, step: int, *max_norms: float) -> None:
        """One window, clipped to each of ``max_norms``."""
        self.scaler.scale(loss_of(self.model, step)).backward()
        if max_norms:
            self.scaler.unscale_(self.inner)
        for limit in max_norms:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.inner)
        self.scaler.update()
        self.inner.zero_grad()


# Orders that are refused; nothing moves, and after `zero_grad` the training goes on.


def drop_one(ours: Loop) -> None:
    ours.parameters[-1].grad = None
    ours.scaler.scale(ours.parameters[-1].sum()).backward()
    ours.optimizer.step()


def backward_of_before(ours: Loop) -> None:
    late = ours.scaler.scale(loss_of(ours.model, 1))
    ours.clip(0.25)
    late.backward()
    ours.optimizer.step()


def backward_and(then: str, end: Callable[[Any], Any] = lambda scaler: None) -> Any:
    """``end`` of the window in its middle, another backward, and then this."""

    def go_on(ours: Loop) -> None:
        end(ours.scaler)
        ours.backward(1)
        if then == "clip":
            ours.clip(0.25)
        elif then == "scaler.unscale_":
            ours.scaler.unscale_(ours.inner)
        else:
            ours.optimizer.step()

    return go_on


def load_scale(scaler: Any) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})


AFTER_A_CLIP: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "one of its gradients is made again": (drop_one, "added scaled gradients"),
    "the backward of a loss scaled before": (backward_of_before, "added scaled gradients"),
    "another backward, step": (backward_and("step"), "added scaled gradients"),
    "another backward, clip": (backward_and("clip"), "added scaled gradients"),
    "given up, clip": (backward_and("clip", GradScaler.abandon_window), "go on"),
    "given up, unscale": (backward_and("scaler.unscale_", GradScaler.abandon_window), "go on"),
    "another scale is loaded": (backward_and("step", load_scale), "go on"),
    "a new scale": (backward_and("step", lambda scaler: scaler.update(64.0)), "go on"),
}


@faces
@pytest.mark.parametrize("name", AFTER_A_CLIP)
def test_scaled_gradients_are_not_added_to_unscaled_ones(face: str, mode: str, name: str) -> None:
    act, match = AFTER_A_CLIP[name]
    with loop(face, mode) as ours:
        before = weights(ours.model)
        ours.backward(0)
        ours.clip(0.25)
        with pytest.raises(OrderError, match=match):
            act(ours)
        assert torch.equal(weights(ours.model), before)
        ours.optimizer.zero_grad()
        ours.scaler.abandon_window()
        reference = Plain()
        reference.window(2)
        ours.backward(2)
        ours.optimizer.step()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))


@faces
@pytest.mark.parametrize("change", [GradScaler.backoff, load_scale, lambda s: s.update(64.0)])
def test_what_is_scaled_still_is_brought_to_a_new_scale(face: str, mode: str, change: Any) -> None:
    """It is added to, and stepped, at that one."""
    reference = Plain()
    for step in range(2):
        loss_of(reference.model, step).backward()
    reference.inner.step()
    with loop(face, mode) as ours:
        ours.backward(0)
        change(ours.scaler)
        assert ours.scaler.get_scale() < SCALE
        ours.backward(1)
        ours.optimizer.step()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))


def step_twice(ours: Loop) -> None:
    ours.backward(0)
    ours.optimizer.step()
    ours.optimizer.step()


def clip_after_the_step(ours: Loop) -> None:
    ours.backward(0)
    ours.optimizer.step()
    ours.clip(0.25)


def step_unscaled(ours: Loop) -> None:
    loss_of(ours.model, 0).backward()
    ours.optimizer.step()


def gradients_of_before(ours: Loop) -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    own = AsyncOptimizer(SGD([p], lr=0.1), scaler=ours.scaler)
    with own:
        ours.scaler.scale(p.sum()).backward()
        own.step()


@faces
@pytest.mark.parametrize(
    ("act", "match"),
    [
        (gradients_of_before, "had gradients before"),
        (step_twice, "already stepped"),
        (clip_after_the_step, "already stepped"),
        (step_unscaled, "no loss was scaled"),
    ],
)
def test_an_order_that_is_refused(face: str, mode: str, act: Any, match: str) -> None:
    with loop(face, mode) as ours, pytest.raises(OrderError, match=match):
        act(ours)


@modes
@pytest.mark.parametrize("zeroed", ["in the window", "before it is given up", "after that"])
def test_gradients_of_an_optimizer_that_sat_out_after_a_clip_are_refused(
    mode: str, zeroed: str
) -> None:
    """They are unscaled, until they are zeroed. Without a clip they accumulate on, see the random
    histories."""
    scaler, params, _, ours, clipper = several("accelerate", mode)
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    clipper.clip_grad_norm_(params, 1e6)
    ours[0].step()
    ours[0].zero_grad()
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    ours[0].step()
    with pytest.raises(OrderError, match="sat out the step before"):
        ours[1].step()
    if zeroed == "after that":
        scaler.abandon_window()
    ours[1].zero_grad()
    if zeroed == "before it is given up":
        scaler.abandon_window()
    scaler.scale(params[1].sum()).backward()
    ours[1].step()
    ours[1].synchronize()
    assert params[1].tolist() == [1.875] * 3
    close_all("accelerate", scaler, ours, clipper)


# Several optimizers, several faces, one scaler.


@modes
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("clip", ["accelerator", "optimizer", "nobody"])
def test_an_async_optimizer_with_the_accelerators_scaler(
    mode: str, prepared: bool, clip: str
) -> None:
    reference = Plain()
    accelerator = attached()
    accelerator.native_amp = False
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours = AsyncOptimizer(inner, model, scaler=accelerator.scaler, step_mode=mode)
    with ours:
        model = accelerator.prepare(model)
        stepping: Any = accelerator.prepare(ours) if prepared else ours
        for step in range(4):
            reference.window(step, *([] if clip == "nobody" else [0.25]))
            accelerator.backward(loss_of(model, step))
            if clip == "accelerator":
                accelerator.clip_grad_norm_(model.parameters(), 0.25)
            if clip == "optimizer":
                ours.clip_grad_norm_(0.25)
            stepping.step()
            assert stepping.step_was_skipped is False
            stepping.zero_grad()
        ours.synchronize()
        assert torch.equal(weights(model), weights(reference.model))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda grad: grad.mul_(2),
    "part of it": lambda grad: grad[:1].fill_(3.0),
    ".detach()": lambda grad: grad.detach().add_(1.0),
}


@pytest.mark.parametrize("edit", CHANGES)
@pytest.mark.parametrize("then", ["step", "clip", "submit"])
def test_a_change_of_what_stays_scaled_is_refused(edit: str, then: str) -> None:
    """The update would scale it too. Reading it is free."""
    model: Any = mlp().half()
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with AsyncOptimizer(inner, model, scaler=scaler) as ours:
        ends = {
            "step": ours.step,
            "clip": lambda: ours.clip_grad_norm_(0.005),
            "submit": lambda: ours.submit(ours.step),
        }
        for act in (Tensor.numpy, CHANGES[edit]):
            before = weights(model)
            x = torch.ones(2, 8, dtype=torch.float16)
            scaler.scale(model(x).float().mean()).backward()
            ours.clip_grad_norm_(0.01)
            act(model[0].weight.grad)
            if act is not CHANGES[edit]:
                ours.step()
                ours.synchronize()
                assert not torch.equal(weights(model), before)
                ours.zero_grad()
                continue
            with pytest.raises(OrderError, match="changed after they were clipped"):
                ends[then]()
            assert torch.equal(weights(model), before)


@faces
@pytest.mark.parametrize("clipped", [True, False])
def test_a_hook_before_the_step_sees_unscaled_gradients(
    face: str, mode: str, clipped: bool
) -> None:
    """And what it changes is stepped."""
    seen: dict[str, list[Tensor]] = {"ours": [], "torch": []}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    seen[name].append(p.grad.clone())
                    p.grad.mul_(0.5)

        return hook

    reference = Plain()
    handle = reference.inner.register_step_pre_hook(hook_of("torch"))
    with loop(face, mode) as ours:
        ours.inner.register_step_pre_hook(hook_of("ours"))
        for step in range(3):
            reference.window(step, *([0.25] if clipped else []))
            ours.backward(step)
            if clipped:
                ours.clip(0.25)
            ours.optimizer.step()
            ours.optimizer.zero_grad()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))
    assert len(seen["ours"]) == len(seen["torch"]) > 0
    assert all(map(torch.equal, seen["ours"], seen["torch"]))
    handle.remove()


@modes
def test_a_hook_that_would_see_scaled_float16_gradients_is_refused(mode: Any) -> None:
    model = mlp().half()
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = SGD(model.parameters(), lr=0.1)
    with AsyncOptimizer(inner, model, scaler=scaler, step_mode=mode) as ours:
        before = weights(model)
        handle = inner.register_step_pre_hook(lambda *_: None)
        scaler.scale(model(torch.ones(2, 8, dtype=torch.float16)).float().mean()).backward()
        with pytest.raises(UnsupportedError, match="register_step_pre_hook"):
            ours.step()
        assert torch.equal(weights(model), before)
        handle.remove()
        ours.step()
        ours.synchronize()
        assert not torch.equal(weights(model), before)


def several(
    face: str, mode: str, count: int = 2, **settings: Any
) -> tuple[Any, list[nn.Parameter], list[SGD], list[Any], Callable[[Any], Any]]:
    """One parameter each: scaler, parameters, torch's optimizers, ours, and a way to clip."""
    params = [nn.Parameter(torch.full((3,), float(i + 1))) for i in range(count)]
    inner = [SGD([p], lr=0.125, momentum=0.5) for p in params]
    if face == "accelerate":
        accelerator = attached(mode, **settings)
        ours = [accelerator.prepare(o) for o in inner]
        return accelerator.scaler, params, inner, ours, accelerator
    scaler = GradScaler("cpu", init_scale=SCALE)
    ours = [AsyncOptimizer(o, scaler=scaler, step_mode=mode) for o in inner]
    return scaler, params, inner, ours, ours[0]


def close_all(face: str, scaler: Any, ours: list[Any], clipper: Any) -> None:
    scaler.abandon_window()
    if face == "accelerate":
        detach(clipper)
    else:
        for each in ours:
            each.close()


@pytest.mark.parametrize("on_overflow", ["skip", "retry"])
def test_gradients_that_a_script_drops_after_a_clip_are_a_skip_as_in_stock(
    on_overflow: str,
) -> None:
    """The verdict is the window's, whatever became of the gradients."""

    def run(accelerator: Any) -> list[Any]:
        p = nn.Parameter(torch.ones(3))
        optimizer = accelerator.prepare(SGD([p], lr=0.125))
        schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        seen: list[Any] = []
        for factor in (INF, 1.0):
            accelerator.backward(p.sum() * factor)
            if not torch.isfinite(accelerator.clip_grad_norm_([p], 1.0)):
                optimizer.zero_grad()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append((optimizer.step_was_skipped, schedule.get_last_lr(), p.tolist()))
            seen.append(accelerator.scaler.get_scale())
        return seen

    theirs = run(stock(kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)]))
    accelerator = attached(on_overflow=on_overflow)
    assert run(accelerator) == theirs
    assert [record.skipped for record in accelerator.scaler_history.records] == [True, False]
    detach(accelerator)


@modes
@pytest.mark.parametrize("how", ["unscale_", "step"])
@pytest.mark.parametrize("first", ["overflows", "lets the scale grow"])
def test_by_hand_after_another_has_stepped(mode: str, how: str, first: str) -> None:
    """The window's scale holds for all of it (F3), whoever unscales."""
    grows = first != "overflows"
    scaler, params, inner, ours, clipper = several(
        "accelerate", mode, growth_interval=1 if grows else 2000
    )
    clipper.backward(params[0].sum() * (1.0 if grows else INF) + params[1].sum())
    ours[0].step()
    assert scaler.get_scale() == (SCALE * 2 if grows else SCALE / 2)
    if how == "unscale_":
        scaler.unscale_(inner[1])
        ours[1].step()
        ours[1].synchronize()
    else:
        scaler.step(inner[1])
    assert params[1].tolist() == [1.875] * 3
    assert scaler.get_scale() == (SCALE * 2 if grows else SCALE / 2)
    close_all("accelerate", scaler, ours, clipper)
    assert params[1].tolist() == [1.875] * 3


@faces
@pytest.mark.parametrize("order", ["clip step own", "clip own step", "unscale clip step own"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_plain_optimizer_beside_ours(face: str, mode: str, order: str, bad: bool) -> None:
    """Stepped with ``scaler.step``. A clip leaves its parameters alone; its overflow counts."""
    scaler, params, _, ours, clipper = several(face, mode, 1)
    other = nn.Parameter(torch.ones(3))
    plain = SGD([other], lr=0.125)
    scaler.scale(params[0].sum() + other.sum() * (INF if bad else 1.0)).backward()
    calls = {
        "unscale": lambda: scaler.unscale_(plain),
        "step": lambda: scaler.step(plain),
        "own": ours[0].step,
        "clip": lambda: (
            clipper.clip_grad_norm_(params, 1e6)
            if face == "accelerate"
            else clipper.clip_grad_norm_(1e6)
        ),
    }
    for name in order.split():
        calls[name]()
    ours[0].synchronize()
    scaler.update()
    assert (params[0].tolist(), other.tolist()) == ([0.875] * 3, [1.0 if bad else 0.875] * 3)
    assert scaler.get_scale() == (SCALE / 2 if bad else SCALE)
    close_all(face, scaler, ours, clipper)


def test_an_async_optimizer_of_an_accelerators_scaler_steps_at_its_boundary() -> None:
    """The spike guard, telemetry and the search for an overflow are the accelerator's."""
    accelerator = attached(init_scale=16.0, skip_norm_above=10.0)
    model = accelerator.prepare(Linear())
    sgd = SGD(model.parameters(), lr=LR)
    with AsyncOptimizer(sgd, model, scaler=accelerator.scaler, step_mode="sync") as optimizer:
        skipped = []
        for gradient in (1.0, 100.0, INF, 1.0):
            accelerator.backward(model(gradient))
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, True, False]
    assert model.moved == 2.0
    assert accelerator.scaler.get_scale() == 8.0
    records = accelerator.scaler_history.records
    assert [r.skipped for r in records] == skipped
    assert [r.spike for r in records] == [False, True, False, False]
    detach(accelerator)


def test_scaled_gradients_of_masters_are_not_stepped_by_torchs_own_optimizer() -> None:
    """A clip leaves them scaled for the prepared optimizer, which alone knows."""
    accelerator = attached(init_scale=16.0)
    model: Any = Linear().half()
    inner = SGD(model.parameters(), lr=LR)
    model, optimizer = accelerator.prepare(model, inner)
    accelerator.backward(model(1.0))
    accelerator.clip_grad_norm_(model.parameters(), 1e6)
    with pytest.raises(OrderError, match="still are scaled"):
        accelerator.scaler.step(inner)
    assert model.moved == 0.0
    optimizer.step()
    assert model.moved == 1.0
    detach(accelerator)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_gradients_of_a_skipped_step_that_are_kept_have_one_scale(norm_type: float) -> None:
    """Of two optimizers the first overflows, the second one's gradients are finite and stay."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    accelerator = attached(init_scale=1024.0)
    first, second = accelerator.prepare(
        *(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net)
    )

    def backward() -> None:
        with accelerator.autocast():
            loss = net(torch.ones(5, 3)).float().square().mean()
        accelerator.backward(loss)

    backward()
    assert net[0].weight.grad is not None
    assert net[1].bias.grad is not None
    expected = 2 * net[1].bias.grad / 1024.0
    net[0].weight.grad[0, 0] = float("nan")
    accelerator.clip_grad_norm_(net.parameters(), 0.5, norm_type)
    for optimizer in (first, second):
        optimizer.step()
        assert optimizer.step_was_skipped
    backward()
    if norm_type == 1.0:  # unscaled by the check
        with pytest.raises(OrderError, match="sat out the step before"):
            accelerator.clip_grad_norm_(net[1].parameters(), 1e9)
    else:
        accelerator.clip_grad_norm_(net[1].parameters(), 1e9)
        assert torch.equal(net[1].bias.grad, expected)
    accelerator.scaler.abandon_window()
    detach(accelerator)
