"""One record of a window: whoever unscales, clips or drops, the step goes by what was found.

Each run has plain torch, or stock Accelerate, beside it. SGD shows a wrong scale at once.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import mlp, weights
from torch import Tensor, nn
from torch.optim import SGD

from accel_scaler import AsyncOptimizer, GradScaler, OrderError, ScalerConfig, attach, detach
from accel_scaler.errors import UnsupportedError
from accel_scaler.scaling.window import Snapshot

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
SCALE = 1024.0
MODES = ["sync", "overlap", "delayed"]
WAYS = [("sync", "none"), ("sync", "cpu"), ("overlap", "none"), ("delayed", "cpu")]
NAMES = [f"{mode}-{offload}" for mode, offload in WAYS]
ways = pytest.mark.parametrize(("mode", "offload"), WAYS, ids=NAMES)


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    torch.manual_seed(step)
    loss: Tensor = model(torch.randn(4, 8)).float().square().mean() * factor
    return loss


def attached(mode: str = "sync", init_scale: float = SCALE, **settings: Any) -> Any:
    return attach(
        Accelerator(cpu=True, mixed_precision="fp16"),
        ScalerConfig(init_scale=init_scale, step_mode=mode, optimizer_threads=1, **settings),  # type: ignore[arg-type]
    )


class Loop:
    """A model with its scaler and optimizer, by hand or under Accelerate."""

    def __init__(self, face: str, mode: str, offload: str, **settings: Any) -> None:
        self.model: Any = mlp()
        self.inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accelerator: Any = None
        if face == "accelerate":
            self.accelerator = attached(mode, offload=offload, **settings)
            self.accelerator.native_amp = False  # the numbers of float32: only scaling is meant
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.inner)
            self.scaler = self.accelerator.scaler
        else:
            self.scaler = GradScaler("cpu", init_scale=SCALE)
            self.optimizer = AsyncOptimizer(
                self.inner,
                self.model,
                scaler=self.scaler,
                mode=mode,
                offload=offload,
                optimizer_threads=1,
                **settings,
            )

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def backward(self, step: int, factor: float = 1.0, by_hand: bool = False) -> None:
        loss = loss_of(self.model, step, factor)
        if self.accelerator is None or by_hand:
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
def loop(face: str, mode: str, offload: str = "none", **settings: Any) -> Iterator[Loop]:
    made = Loop(face, mode, offload, **settings)
    try:
        yield made
        made.optimizer.synchronize()
    finally:
        made.scaler.abandon_window()
        made.close()


class Plain:
    """The same by hand, with torch's scaler."""

    def __init__(self) -> None:
        self.model = mlp()
        self.inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def window(
        self,
        step: int,
        *max_norms: float | None,
        factor: float = 1.0,
        edit: Callable[[Tensor], Any] | None = None,
        unscaled: bool = False,
    ) -> list[float]:
        """One window, clipped by each of ``max_norms``; ``edit`` changes gradients after that.

        Returns what each clip returned; ``grads`` are the gradients just before the step.
        """
        self.scaler.scale(loss_of(self.model, step, factor)).backward()
        limits = [limit for limit in max_norms if limit is not None]
        if limits or unscaled:
            self.scaler.unscale_(self.inner)
        params = list(self.model.parameters())
        norms = [float(torch.nn.utils.clip_grad_norm_(params, limit)) for limit in limits]
        for p in params if edit is not None else ():
            edit(p)  # type: ignore[misc]
        self.grads = [p.grad.clone() for p in params]
        self.scaler.step(self.inner)
        self.scaler.update()
        self.inner.zero_grad()
        return norms


faces = pytest.mark.parametrize("face", ["accelerate", "by hand"])


# (1), (7a) and (9) Who unscales, who clips, what others see of the gradients and change in them.

EDITS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda p: p.grad.add_(p.detach(), alpha=0.01),
    "through .data": lambda p: p.grad.data.add_(p.detach(), alpha=0.01),
    "replaced": lambda p: setattr(p, "grad", p.grad + 0.01 * p.detach()),
}


def clip_by_hand(ours: Loop) -> None:
    ours.scaler.unscale_(ours.optimizer)
    torch.nn.utils.clip_grad_norm_(ours.parameters, 0.25)


WINDOWS: dict[str, tuple[tuple[float, ...], Callable[[Loop], Any]]] = {
    "not clipped": ((), lambda ours: None),
    "unscaled by hand": ((), lambda ours: ours.scaler.unscale_(ours.inner)),
    "unscaled by hand through ours": ((), lambda ours: ours.scaler.unscale_(ours.optimizer)),
    "unscaled and clipped by hand": ((0.25,), clip_by_hand),
    "clipped": ((0.25,), lambda ours: [ours.clip(0.25)]),
    "not reached by its clip": ((1e6,), lambda ours: [ours.clip(1e6)]),
    "clipped again": ((0.5, 0.25), lambda ours: [ours.clip(0.5), ours.clip(0.25)]),
}


@faces
@ways
@pytest.mark.parametrize(
    ("name", "edit"),
    [*((name, "") for name in WINDOWS), *product(("not clipped", "clipped"), EDITS)],
)
def test_a_window_is_that_of_torchs_own_calls(
    face: str, mode: str, offload: str, name: str, edit: str
) -> None:
    """The verdict of who unscales counts, nothing is unscaled twice, a second clip clips what the
    first left, ``.grad`` is what torch leaves there after a clip, an edit before the step counts
    (of what was not unscaled yet, too; with offload it may have been sent by then)."""
    limits, act = WINDOWS[name]
    change = EDITS.get(edit)
    reference = Plain()
    with loop(face, mode, offload, delay_warmup_steps=99) as ours:
        for step in range(4):
            overflow = step == 1 and not edit
            factor, unscaled = INF if overflow else 1.0, name != "not clipped"
            expected = reference.window(
                step, *limits, factor=factor, edit=change, unscaled=unscaled
            )
            ours.backward(step, factor)
            norms = act(ours)
            for p in ours.parameters if change is not None else ():
                change(p)
            if not overflow:
                assert norms in (None, expected)
                for p, grad in zip(ours.parameters, reference.grads, strict=True):
                    assert torch.equal(p.grad, grad)
            ours.optimizer.step()
            assert ours.optimizer.step_was_skipped is overflow
            ours.optimizer.zero_grad()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))
        assert ours.scaler.get_scale() == reference.scaler.get_scale()


@ways
def test_clipped_by_the_optimizer_stepped_by_the_scaler(mode: str, offload: str) -> None:
    """What the clip left to the update goes along with ``scaler.step`` too."""
    reference = Plain()
    with loop("by hand", mode, offload, delay_warmup_steps=99) as ours:
        for step in range(4):
            reference.window(step, 0.25)
            ours.backward(step)
            ours.clip(0.25)
            ours.scaler.step(ours.optimizer)
            ours.scaler.update()
            ours.optimizer.zero_grad()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))


# (2) A batch is dropped after a look at its norm.


@faces
@ways
@pytest.mark.parametrize("by_hand", [False, True], ids=["accelerator.backward", "scaler.scale"])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("dropped", [1.0, 1e4, INF])
def test_a_batch_dropped_after_a_look_at_its_norm(
    face: str, mode: str, offload: str, by_hand: bool, to_none: bool, dropped: float
) -> None:
    """Clip, zero, next backward: before, that moved 1,705 times too far, or applied NaN."""
    reference = Plain()
    with loop(face, mode, offload, delay_warmup_steps=99) as ours:
        for step in range(4):
            if step == 2:
                ours.backward(17, dropped, by_hand)
                norm = ours.clip(0.25)
                assert (norm == INF) == (dropped == INF)
                ours.inner.zero_grad(set_to_none=to_none)
            reference.window(step, 0.25)
            ours.backward(step, by_hand=by_hand)
            ours.clip(0.25)
            ours.optimizer.step()
            assert ours.optimizer.step_was_skipped is False
            ours.optimizer.zero_grad()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))
        assert ours.scaler.get_scale() == SCALE


@faces
@ways
def test_half_a_batch_is_dropped(face: str, mode: str, offload: str) -> None:
    """One gradient given up, the others kept: the next backward mixes, whichever it reaches."""
    with loop(face, mode, offload) as ours:
        before = weights(ours.model)
        ours.backward(0)
        ours.clip(0.25)
        last = ours.parameters[-1]
        last.grad = None
        ours.scaler.scale(last.sum()).backward()  # reaches only what was dropped
        with pytest.raises(OrderError, match="added scaled gradients"):
            ours.optimizer.step()
        ours.optimizer.zero_grad()
        assert torch.equal(weights(ours.model), before)
        reference = Plain()
        reference.window(1)
        ours.backward(1)
        ours.optimizer.step()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))


# (3) A clip before the last micro-batch.


@ways
@pytest.mark.parametrize("later", [1.0, INF])
def test_a_clip_before_the_last_micro_batch_is_refused(
    mode: str, offload: str, later: float
) -> None:
    """Without Accelerate nobody knows which one is the last. An overflow was applied before."""
    with loop("by hand", mode, offload) as ours:
        before = weights(ours.model)
        ours.backward(0)
        ours.clip(0.25)
        ours.backward(1, later)
        with pytest.raises(OrderError, match="added scaled gradients"):
            ours.optimizer.step()
        with pytest.raises(OrderError, match="added scaled gradients"):
            ours.clip(0.25)
        assert torch.equal(weights(ours.model), before)
        ours.optimizer.zero_grad()
        reference = Plain()
        reference.window(2, 0.25)
        ours.backward(2)
        ours.clip(0.25)
        ours.optimizer.step()
        ours.optimizer.synchronize()
        assert torch.equal(weights(ours.model), weights(reference.model))


# (4) and (5) Several optimizers, several faces, one scaler.


def pair() -> tuple[list[nn.Module], list[SGD]]:
    models: list[nn.Module] = [mlp(), mlp(8)]
    return models, [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]


def plain_pair(steps: int, max_norm: float) -> list[Tensor]:
    models, optimizers = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(steps):
        scaler.scale(loss_of(models[0], step) + loss_of(models[1], step)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        params = [p for m in models for p in m.parameters()]
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [weights(m) for m in models]


@ways
@pytest.mark.parametrize("clipping", [0, 1])
def test_one_clips_the_parameters_of_both(mode: str, offload: str, clipping: int) -> None:
    """Before, the other one's were unscaled twice."""
    expected = plain_pair(4, 0.25)
    models, inner = pair()
    scaler = GradScaler("cpu", init_scale=SCALE)
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                AsyncOptimizer(
                    o,
                    m,
                    scaler=scaler,
                    mode=mode,
                    offload=offload,
                    delay_warmup_steps=99,
                    optimizer_threads=1,
                )
            )
            for o, m in zip(inner, models, strict=True)
        ]
        for step in range(4):
            scaler.scale(loss_of(models[0], step) + loss_of(models[1], step)).backward()
            params = [p for m in models for p in m.parameters()]
            both[clipping].clip_grad_norm_(0.25, parameters=params)
            for optimizer in both:
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad()
        for optimizer in both:
            optimizer.synchronize()
        for model, reference in zip(models, expected, strict=True):
            assert torch.equal(weights(model), reference)
        assert scaler.get_scale() == SCALE


@ways
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("clip", ["accelerator", "optimizer", "both", "nobody"])
def test_an_async_optimizer_with_the_accelerators_scaler(
    mode: str, offload: str, prepared: bool, clip: str
) -> None:
    """Prepared, or clipped by the accelerator: before, it was unscaled twice."""
    reference = Plain()
    accelerator = attached()
    accelerator.native_amp = False
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours = AsyncOptimizer(
        inner,
        model,
        scaler=accelerator.scaler,
        mode=mode,
        offload=offload,
        delay_warmup_steps=99,
        optimizer_threads=1,
    )
    with ours:
        model = accelerator.prepare(model)
        stepping: Any = accelerator.prepare(ours) if prepared else ours
        for step in range(4):
            reference.window(step, None if clip == "nobody" else 0.25)
            accelerator.backward(loss_of(model, step))
            if clip in ("accelerator", "both"):
                accelerator.clip_grad_norm_(model.parameters(), 0.25)
            if clip in ("optimizer", "both"):
                ours.clip_grad_norm_(0.25)
            stepping.step()
            assert stepping.step_was_skipped is False
            stepping.zero_grad()
        accelerator.backward(loss_of(model, 9, INF))
        stepping.step()
        assert stepping.step_was_skipped is True
        stepping.zero_grad()
        ours.synchronize()
        if clip == "both":  # what a second clip of already clipped gradients rounds
            torch.testing.assert_close(weights(model), weights(reference.model))
        else:
            assert torch.equal(weights(model), weights(reference.model))
        assert accelerator.scaler.get_scale() == SCALE / 2


@faces
@ways
@pytest.mark.parametrize("clipped", [True, False])
def test_a_hook_before_the_step_sees_unscaled_gradients(
    face: str, mode: str, offload: str, clipped: bool
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
    with loop(face, mode, offload, delay_warmup_steps=99) as ours:
        ours.inner.register_step_pre_hook(hook_of("ours"))
        for step in range(3):
            reference.window(step, 0.25 if clipped else None)
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


def _neg(grad: Tensor) -> None:
    grad.data.neg_()  # keeps every norm


def _write_numpy(grad: Tensor) -> None:
    grad.numpy()[...] += 0.5


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda grad: grad.mul_(2),
    ".data": lambda grad: grad.data.add_(0.125),
    "a row of .data": lambda grad: grad.data[:1].fill_(3.0),
    ".data, turned round": _neg,
    ".detach()": lambda grad: grad.detach().add_(1.0),
    ".numpy()": _write_numpy,
    "an edge of .data": lambda grad: grad.data.view(-1)[-1:].sub_(1.0),
}


@pytest.mark.parametrize(
    ("edit", "then"),
    [*product(CHANGES, ["step"]), *product([".data"], ["clip", "scaler.step", "submit"])],
)
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_change_of_what_stays_scaled_is_refused(edit: str, mode: str, then: str) -> None:
    """No version counter shows most of them; the update would scale them too."""
    model: Any = mlp().half()
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner: Any = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with AsyncOptimizer(inner, model, scaler=scaler, mode=mode, optimizer_threads=1) as ours:

        def backward() -> None:
            scaler.scale(model(torch.ones(2, 8, dtype=torch.float16)).float().mean()).backward()

        def go_on() -> None:
            if then == "scaler.step":
                scaler.step(ours)
                scaler.update()
            elif then == "submit":
                ours.submit(ours.step)
                scaler.update()
            else:
                if then == "clip":
                    ours.clip_grad_norm_(0.005)
                ours.step()
            ours.synchronize()

        before, weight = weights(model), model[0].weight
        for read in (lambda p: p.grad.numpy().sum(), lambda p: p.grad.data.tolist()):
            backward()
            ours.clip_grad_norm_(0.01)
            for p in model.parameters():
                read(p)  # nobody writes
            go_on()
            ours.zero_grad()
        trained = weights(model)
        assert not torch.equal(trained, before)
        backward()
        ours.clip_grad_norm_(0.01)
        CHANGES[edit](weight.grad)
        with pytest.raises(OrderError, match="changed after they were clipped"):
            go_on()
        assert torch.equal(weights(model), trained)
        ours.zero_grad()
        scaler.abandon_window()
        backward()
        ours.clip_grad_norm_(0.01)
        go_on()
        assert not torch.equal(weights(model), trained)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "nobody": lambda grad: None,
    "norm": lambda grad: grad.norm(),
    "a list of them": lambda grad: torch._foreach_norm([grad]),
    "numpy": lambda grad: grad.numpy().sum(),
    "torch.tensor": lambda grad: torch.tensor(grad),
    "isinstance": lambda grad: isinstance(grad, Tensor) and float(grad.sum()),
    **CHANGES,
}


def folding(mode: str) -> Any:
    accelerator = attached(mode, fold_unscale=True)
    accelerator.native_amp = False
    return accelerator


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("then", ["step", "clip"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("memory", ["torch's", "numpy's", "one buffer"])
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_whoever_looks_at_folded_gradients_finds_torchs(
    mode: str, memory: str, look: str, then: str
) -> None:
    """They stay scaled for the kernel while nobody looks, and can be changed as they are there."""
    reference, accelerator, mine = Plain(), folding(mode), mlp()
    reference.inner = SGD(reference.model.parameters(), lr=0.1, momentum=0.9, fused=True)
    inner = SGD(mine.parameters(), lr=0.1, momentum=0.9, fused=True)
    model, optimizer = accelerator.prepare(mine, inner)
    for step in range(3):
        reference.scaler.scale(loss_of(reference.model, step)).backward()
        reference.scaler.unscale_(reference.inner)
        accelerator.backward(loss_of(model, step))
        params, theirs = list(mine.parameters()), list(reference.model.parameters())
        buffer = torch.cat([p.grad.reshape(-1) for p in params])  # type: ignore[union-attr]
        pieces = buffer.split([p.numel() for p in params])
        for p, piece in zip(params, pieces, strict=True):
            if memory == "numpy's":
                p.grad = torch.from_numpy(p.grad.numpy().copy())  # type: ignore[union-attr]
            elif memory == "one buffer":
                p.grad = piece.view_as(p)
        accelerator.clip_grad_norm_(params, 0.25)
        torch.nn.utils.clip_grad_norm_(theirs, 0.25)
        record = accelerator.scaler.window.record(inner)
        assert bool(record.deferred) is (memory != "one buffer")  # those are not seen used
        LOOKS[look](params[0].grad)
        LOOKS[look](theirs[0].grad)
        if look != "nobody":
            assert not record.deferred
            for p, q in zip(params, theirs, strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        if then == "clip":
            norms = [
                float(accelerator.clip_grad_norm_(params, 0.125)),
                float(torch.nn.utils.clip_grad_norm_(theirs, 0.125)),
            ]
            assert norms[0] == pytest.approx(norms[1])
        optimizer.step()
        reference.scaler.step(reference.inner)
        reference.scaler.update()
        if mode != "delayed":
            torch.testing.assert_close(params[0].grad, theirs[0].grad)
        optimizer.zero_grad()
        reference.inner.zero_grad()
        optimizer.synchronize()
        torch.testing.assert_close(weights(mine), weights(reference.model))
    detach(accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("fold", [False, True])
def test_sam_by_hand_clips_twice_a_window(mode: str, fold: bool) -> None:
    """The first gradients are read and dropped. Folded, the perturbation was one by scaled ones."""

    def train(model: Any, optimizer: Any, backward: Any, clip: Any) -> Tensor:
        params = list(model.parameters())
        for step in range(4):
            backward(loss_of(model, step))
            norm = clip(params, 0.25)
            with torch.no_grad():
                moves = [0.05 * p.grad / (norm + 1e-3) for p in params]
                torch._foreach_add_(params, moves)
            optimizer.zero_grad()
            backward(loss_of(model, step))
            with torch.no_grad():
                torch._foreach_sub_(params, moves)
            clip(params, 0.25)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    plain = mlp()
    expected = train(
        plain,
        SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=True),
        Tensor.backward,
        torch.nn.utils.clip_grad_norm_,
    )
    accelerator = folding(mode) if fold else attached(mode)
    accelerator.native_amp = False
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    model, optimizer = accelerator.prepare(model, inner)
    trained = train(model, optimizer, accelerator.backward, accelerator.clip_grad_norm_)
    torch.testing.assert_close(trained, expected)
    detach(accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_another_thread_looks_at_folded_gradients(mode: str) -> None:
    """Several at once, and while the step takes them: unscaled once, or by the kernel."""
    accelerator, model = folding(mode), mlp()
    inner = SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = accelerator.prepare(model, inner)
    for step in range(20):
        accelerator.backward(loss_of(model, step))
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        before = [p.detach().clone() for p in model.parameters()]
        grads, found = [p.grad for p in model.parameters()], []
        start = threading.Barrier(4)

        def read(start: Any = start, grads: Any = grads, found: Any = found) -> None:
            start.wait()
            found.append([grad.clone() for grad in grads])

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        if step % 2:
            optimizer.step()
        for thread in threads:
            thread.join()
        if not step % 2:
            optimizer.step()
            assert len(found) == 3
            assert all(
                torch.equal(g, h) for each in found for g, h in zip(each, grads, strict=True)
            )
        optimizer.synchronize()
        for p, q, grad in zip(model.parameters(), before, grads, strict=True):
            torch.testing.assert_close(p.detach(), q - 0.1 * grad)
        optimizer.zero_grad()
    detach(accelerator)


@pytest.mark.parametrize("to_none", [False, True])
def test_a_folded_batch_is_dropped_after_a_look_at_its_norm(to_none: bool) -> None:
    """Gradients that were put aside unread are unscaled, too, whenever they are read."""
    accelerator, p = folding("sync"), nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(SGD([p], lr=0.125, fused=True))
    accelerator.backward(p.sum() * 8)
    accelerator.clip_grad_norm_([p], 1e6)
    aside = p.grad
    optimizer.zero_grad(set_to_none=to_none)
    accelerator.backward(p.sum())
    accelerator.clip_grad_norm_([p], 1e6)
    if to_none:
        assert aside is not None
        assert aside.tolist() == [8.0] * 2
    optimizer.step()
    assert p.tolist() == [0.875] * 2
    detach(accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_one_clips_folded_while_another_goes_on(mode: str) -> None:
    """As a discriminator does beside a generator, in one window."""
    accelerator, (p, q) = folding(mode), (nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = (accelerator.prepare(SGD([each], lr=0.125, fused=True)) for each in (p, q))
    accelerator.backward(p.sum() * 4)
    accelerator.clip_grad_norm_([p], 2**0.5)
    accelerator.backward(q.sum() * 4)
    accelerator.clip_grad_norm_([q], 2**0.5)
    for each in (first, second):
        each.step()
        each.synchronize()
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.875))
    torch.testing.assert_close(q.detach(), torch.full((2,), 0.875))
    detach(accelerator)


def test_a_folded_gradient_keeps_no_optimizer() -> None:
    accelerator, p = folding("sync"), nn.Parameter(torch.ones(2))
    inner = SGD([p], lr=0.125, fused=True)
    optimizer = accelerator.prepare(inner)
    accelerator.backward(p.sum())
    accelerator.clip_grad_norm_([p], 1e6)
    grad, gone = p.grad, weakref.ref(inner)
    optimizer.zero_grad()
    accelerator.scaler.abandon_window()
    accelerator.free_memory()
    detach(accelerator)
    del optimizer, inner, accelerator
    gc.collect()
    assert gone() is None
    assert grad is not None
    assert grad.tolist() == [SCALE] * 2


def test_what_stays_scaled_is_not_copied_unless_somebody_writes_to_it() -> None:
    """And once it may be written to it is the memory that it was."""
    grads = [torch.arange(5.0), torch.arange(4, dtype=torch.float16)]
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    before = [g.untyped_storage()._cdata for g in grads]
    snapshot = Snapshot(params, with_contents=True)
    assert not snapshot.is_changed()
    assert all(map(torch._C._is_cow_tensor, grads))
    snapshot.end()
    assert not any(map(torch._C._is_cow_tensor, grads))
    assert [g.untyped_storage()._cdata for g in grads] == before
    assert grads[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_nan_that_stays_is_no_edit() -> None:
    """What is not torch's own memory is copied, as everything is on a device."""
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.from_numpy(torch.tensor([float("nan"), INF, 1.0]).numpy().copy())
    snapshot = Snapshot([p], with_contents=True)
    assert not snapshot.is_changed()
    p.grad.data[2] = 2.0
    assert snapshot.is_changed()


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_a_hook_that_would_see_scaled_float16_gradients_is_refused(mode: Any) -> None:
    model = mlp().half()
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = SGD(model.parameters(), lr=0.1)
    with AsyncOptimizer(inner, model, scaler=scaler, mode=mode, optimizer_threads=1) as ours:
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


# (8) bfloat16


@pytest.mark.parametrize("face", ["GradScaler", "accelerate"])
@pytest.mark.parametrize("value", [1.0, INF, -INF, float("nan")])
def test_bfloat16_is_unscaled_without_torchs_kernel(
    face: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA that kernel has no bfloat16, here it has: the numbers are compared with it."""
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def no_bfloat16(grads: list[Tensor], *rest: Any) -> None:
        assert all(grad.dtype is not torch.bfloat16 for grad in grads)
        kernel(grads, *rest)

    def run(scaler: Any, step: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        p = nn.Parameter(torch.randn(33, dtype=torch.bfloat16))
        q = nn.Parameter(torch.randn(5))
        inner = SGD([p, q], lr=0.125)
        loss = (p.float() * torch.randn(33)).sum() + q.sum()
        scaler.scale(loss).backward()
        assert p.grad is not None
        p.grad[3] *= value
        step(inner)
        return p.detach().clone(), q.detach().clone()

    stock = torch.amp.GradScaler("cpu", init_scale=3000.0)

    def torchs(inner: Any) -> None:
        stock.step(inner)
        stock.update()

    expected = run(stock, torchs)
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", no_bfloat16)
    if face == "GradScaler":
        ours: Any = GradScaler("cpu", init_scale=3000.0)

        def step(inner: Any) -> None:
            ours.step(inner)
            ours.update()
    else:
        accelerator = attached(init_scale=3000.0, master_weights="none")
        ours = accelerator.scaler

        def step(inner: Any) -> None:
            accelerator.prepare(inner).step()

    found = run(ours, step)
    assert all(map(torch.equal, found, expected))
    assert ours.get_scale() == stock.get_scale()


# (18) A parameter that two optimizers share, in sync.


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("value", [1.0, INF])
def test_two_optimizers_share_a_parameter(clip: bool, value: float) -> None:
    """Its gradient is unscaled once; each steps it. Torch by hand would unscale it twice."""

    def make() -> tuple[list[nn.Parameter], list[SGD]]:
        params = [nn.Parameter(torch.full((3,), float(i + 1))) for i in range(3)]
        return params, [SGD(params[:2], lr=0.125), SGD(params[1:], lr=0.25)]

    params, optimizers = make()
    (params[0] * 2.0 + params[1] * 3.0 * value + params[2]).sum().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    if value == 1.0:
        for optimizer in optimizers:
            optimizer.step()
    accelerator = attached()
    mine, inner = make()
    prepared = [accelerator.prepare(o) for o in inner]
    accelerator.backward((mine[0] * 2.0 + mine[1] * 3.0 * value + mine[2]).sum())
    if clip:
        accelerator.clip_grad_norm_(mine, 1.0)
    for each in prepared:
        each.step()
    assert [each.step_was_skipped for each in prepared] == [value != 1.0] * 2
    assert all(map(torch.equal, mine, params))


# A window where nothing is scaled.


def test_where_nothing_is_scaled_there_are_windows_too(tmp_path: Any) -> None:
    """At scale 1, numbered as the steps are, with what was measured in each."""
    path = tmp_path / "run.jsonl"
    accelerator: Any = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="only telemetry"):
        attach(accelerator, ScalerConfig(telemetry=str(path)))
    model = mlp()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(loss_of(model, step))
        if step == 1:
            accelerator.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.step()  # as stock: it steps again on the same gradients
        optimizer.zero_grad()
    records = accelerator.scaler_history.records
    assert [record.index for record in records] == list(range(6))
    assert [record.scale for record in records] == [1.0] * 6
    norms = [record.grad_norm is not None for record in records]
    assert norms == [False, False, True, False, False, False]
    detach(accelerator)


# What an opponent found.


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
    ours = [
        AsyncOptimizer(o, scaler=scaler, mode=mode, optimizer_threads=1, **settings) for o in inner
    ]
    return scaler, params, inner, ours, ours[0]


def close_all(face: str, scaler: Any, ours: list[Any], clipper: Any) -> None:
    scaler.abandon_window()
    if face == "accelerate":
        detach(clipper)
    else:
        for each in ours:
            each.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", ["owned", "of nobody"])
def test_a_value_clip_beside_an_overflow_clips_the_others(mode: str, bad: str) -> None:
    """They stepped with unclipped gradients."""
    accelerator = attached(mode)
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first = accelerator.prepare(SGD([one], lr=0.125)) if bad == "owned" else None
    second = accelerator.prepare(SGD([two], lr=0.125))
    accelerator.backward((one * INF).sum() + (two * 10.0).sum())
    accelerator.clip_grad_value_([one, two], 1.0)
    for optimizer in filter(None, (first, second)):
        optimizer.step()
    second.synchronize()
    detach(accelerator)
    assert (one.tolist(), two.tolist()) == ([1.0, 1.0], [0.875, 0.875])


@pytest.mark.parametrize("mode", MODES)
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
    if how == "step" or mode != "delayed":
        assert params[1].tolist() == [1.875] * 3
    assert scaler.get_scale() == (SCALE * 2 if grows else SCALE / 2)
    close_all("accelerate", scaler, ours, clipper)
    assert params[1].tolist() == [1.875] * 3


@faces
@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize(
    "order", ["clip step own", "clip own step", "clip unscale step own", "unscale clip step own"]
)
def test_a_plain_optimizer_beside_ours(face: str, mode: str, order: str) -> None:
    """Stepped with ``scaler.step``; a clip of its parameters unscales them once."""
    scaler, params, _, ours, clipper = several(face, mode, 1)
    other = nn.Parameter(torch.ones(3))
    plain = SGD([other], lr=0.125)
    scaler.scale(params[0].sum() + other.sum()).backward()
    calls = {
        "unscale": lambda: scaler.unscale_(plain),
        "step": lambda: scaler.step(plain),
        "own": ours[0].step,
        "clip": lambda: (
            clipper.clip_grad_norm_([*params, other], 1e6)
            if face == "accelerate"
            else clipper.clip_grad_norm_(1e6, parameters=[*params, other])
        ),
    }
    for name in order.split():
        calls[name]()
    ours[0].synchronize()
    scaler.update()
    assert (params[0].tolist(), other.tolist()) == ([0.875] * 3, [0.875] * 3)
    assert scaler.get_scale() == SCALE
    close_all(face, scaler, ours, clipper)


@faces
@pytest.mark.parametrize("first", ["plain", "ours"])
def test_the_overflow_of_a_plain_optimizer_backs_the_scale_off(face: str, first: str) -> None:
    scaler, params, _, ours, clipper = several(face, "sync", 1)
    other = nn.Parameter(torch.ones(3))
    plain = SGD([other], lr=0.125)
    for halved in (1, 2, 3):
        scaler.scale(params[0].sum() + other.sum() * INF).backward()
        if first == "ours":
            ours[0].step()
        scaler.step(plain)
        if first == "plain":
            ours[0].step()
        assert scaler.get_scale() == SCALE / 2**halved
        assert ours[0].step_was_skipped is False
        ours[0].zero_grad()
        plain.zero_grad()
    assert other.tolist() == [1.0] * 3
    close_all(face, scaler, ours, clipper)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_a_submitted_step_after_a_clip(dtype: torch.dtype, mode: Any) -> None:
    """What the clip left to be done is done before the job sees its gradients."""
    p = nn.Parameter(torch.ones(2, dtype=dtype))
    scaler = GradScaler("cpu", init_scale=64.0)
    inner = SGD([p], lr=0.25)
    with AsyncOptimizer(inner, scaler=scaler, mode=mode, optimizer_threads=1) as ours:
        scaler.scale(p.float().sum() * 4).backward()
        ours.clip_grad_norm_(2**0.5)
        ours.submit(lambda: scaler.step(ours))
        scaler.update()
        ours.synchronize()
        torch.testing.assert_close(p.float(), torch.full((2,), 0.75), atol=1e-4, rtol=0)


def test_gradients_that_stay_scaled_are_not_stepped_around_their_owner() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = GradScaler("cpu", init_scale=64.0)
    inner = SGD([p], lr=0.25)
    with AsyncOptimizer(inner, scaler=scaler, optimizer_threads=1) as ours:
        scaler.scale(p.float().sum()).backward()
        ours.clip_grad_norm_(1e6)
        with pytest.raises(OrderError, match="Call that one's step"):
            scaler.step(inner)
        assert p.tolist() == [1.0, 1.0]
        ours.step()
        ours.synchronize()
        assert p.tolist() == [0.75, 0.75]


@faces
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_of_a_loss_scaled_before_the_clip(face: str, mode: str) -> None:
    """Scaled, clipped again, and only then its backward: mixed, so refused."""
    with loop(face, mode, "none") as ours:
        before = weights(ours.model)
        ours.backward(0)
        ours.clip(0.25)
        late = ours.scaler.scale(loss_of(ours.model, 1))
        ours.clip(0.25)
        late.backward()
        with pytest.raises(OrderError, match="added scaled gradients"):
            ours.optimizer.step()
        ours.optimizer.zero_grad()
        assert torch.equal(weights(ours.model), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parameters_added_after_a_clip_are_refused(mode: Any, dtype: torch.dtype) -> None:
    """Their gradients are scaled, or clipped as nobody's, and were not checked."""
    old, new = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = SGD([old], lr=0.25)
    with AsyncOptimizer(inner, scaler=scaler, mode=mode, optimizer_threads=1) as ours:
        scaler.scale((old.float() + new.float()).sum()).backward()
        ours.clip_grad_norm_(1e6, parameters=[old, new])
        ours.add_param_group({"params": [new]})
        with pytest.raises(OrderError, match="had 1 parameters"):
            ours.step()
        ours.synchronize()
        assert (old.tolist(), new.tolist()) == ([1.0] * 3, [1.0] * 3)
        ours.zero_grad()
        scaler.scale((old.float() + new.float()).sum()).backward()
        ours.step()
        ours.synchronize()
        assert (old.tolist(), new.tolist()) == ([0.75] * 3, [0.75] * 3)


@faces
@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("why", ["clipped", "another scale", "nothing"])
def test_a_window_that_an_optimizer_sat_out(face: str, mode: str, why: str) -> None:
    """Its gradients accumulate on, whatever the scale does, unless they are unscaled by now."""
    scaler, params, _, ours, clipper = several(face, mode)
    factor = INF if why == "another scale" else 1.0
    scaler.scale(params[0].sum() * factor + params[1].sum()).backward()
    if why == "clipped":
        if face == "accelerate":
            clipper.clip_grad_norm_(params, 1e6)
        else:
            clipper.clip_grad_norm_(1e6, parameters=params)
    ours[0].step()
    ours[0].zero_grad()
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    ours[0].step()
    if why != "clipped":
        ours[1].step()
        ours[1].synchronize()
        assert params[1].tolist() == [1.75] * 3
    else:
        with pytest.raises(OrderError, match="sat out the window before"):
            ours[1].step()
        ours[1].zero_grad()
        scaler.abandon_window()
        ours[1].synchronize()
        assert params[1].tolist() == [2.0] * 3
        scaler.scale(params[1].sum()).backward()
        ours[1].step()
        ours[1].synchronize()
        assert params[1].tolist() == [1.875] * 3
    close_all(face, scaler, ours, clipper)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def every_third(
    kind: str,
    wrap: Callable[..., Any] | None = None,
    *,
    shared: bool = False,
    keeps: bool = False,
    dtype: torch.dtype = torch.float32,
    bad: dict[int, str] | None = None,
) -> tuple[Tensor, list[bool], list[float]]:
    """30 batches; the first optimizer steps after each, the second after every third.

    Args:
        wrap: ours; None: a plain float32 loop without scaling.
        shared: the first one has a parameter of the second, too.
        keeps: gradients are zeroed, not dropped.
        bad: batches in which a gradient of ``first`` or ``second`` overflows.

    Returns the parameters, whether each step of the second was skipped, and the scales.
    """
    model: Any = mlp().to(dtype)
    mine = [list(model[0].parameters()), list(model[2].parameters())]
    both = [KINDS[kind](mine[0] + mine[1][1:] * shared), KINDS[kind](mine[1])]
    scaler, skips, scales = None, [], []
    called, backward = model, Tensor.backward
    if wrap is not None:
        called, *both, scaler, backward = wrap(model, *both)
    for step in range(30):
        if scaler is not None:
            scales.append(scaler.get_scale())
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = called(x).float().square().mean()
        where = (bad or {}).get(step)
        handle = mine[where == "second"][0].register_hook(lambda g, f=INF if where else 1.0: g * f)
        backward(loss)
        handle.remove()
        due = both if step % 3 == 2 else both[:1]
        for optimizer in due:
            optimizer.step()
            skips += [getattr(optimizer, "step_was_skipped", False)] if optimizer is both[1] else []
            optimizer.zero_grad(set_to_none=not keeps)
    for optimizer in both if wrap is not None else ():
        optimizer.synchronize()  # type: ignore[attr-defined]
    return weights(model), skips, scales


MOVES = {"init_scale": 4.0, "growth_interval": 2, "max_scale": 2.0**12}
STANDS = {"init_scale": 512.0, "growth_interval": 10**6}


@contextmanager
def wrapper(face: str, mode: str, offload: str, **settings: Any) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def wrap(model: Any, *both: Any) -> Any:
        if face == "accelerate":
            accelerator = attached(mode, **{"offload": offload, **settings})
            accelerator.native_amp = False
            made.append(lambda: detach(accelerator))
            prepared = accelerator.prepare(model, *both)
            return *prepared, accelerator.scaler, accelerator.backward
        own = {k: settings.pop(k) for k in list(settings) if k == "delay_warmup_steps"}
        scaler = GradScaler("cpu", **settings)
        ours = [
            AsyncOptimizer(
                each,
                model,
                scaler=scaler,
                mode=mode,
                offload=offload,
                optimizer_threads=1,
                **own,
            )
            for each in both
        ]
        made.extend(each.close for each in ours)
        return model, *ours, scaler, lambda loss: scaler.scale(loss).backward()

    try:
        yield wrap
    finally:
        for close in made:
            close()


@faces
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "offload", "shared"),
    [
        (*way, shared)
        for way, shared in product(WAYS, [False, True])
        if not (shared and "delayed" in way)  # refused: each would have masters of its own
    ],
)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_second_optimizer_that_steps_every_third_batch(
    face: str, mode: str, offload: str, kind: str, shared: bool, keeps: bool
) -> None:
    """A plain float32 loop, bit for bit, though the scale moves while its gradients accumulate."""
    expected, _, _ = every_third(kind, shared=shared, keeps=keeps)
    with wrapper(face, mode, offload, **MOVES, delay_warmup_steps=99) as wrap:
        got, skips, scales = every_third(kind, wrap, shared=shared, keeps=keeps)
    assert len(set(scales)) > 8
    assert not any(skips)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_left_over_gradients_in_low_precision(mode: str, dtype: torch.dtype) -> None:
    """As with a scale that stands still."""
    found = []
    for settings in (MOVES, STANDS):
        with wrapper("accelerate", mode, "none", **settings) as wrap:
            found.append(every_third("SGD", wrap, dtype=dtype))
    assert len(set(found[0][2])) > 8
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("where", ["first", "second"])
def test_an_overflow_that_one_optimizer_steps_after(
    mode: str, dtype: torch.dtype, where: str
) -> None:
    """Its own is found at its own boundary, which is skipped; another's is not its."""
    with wrapper("accelerate", mode, "none", **MOVES) as wrap:
        found, skips, scales = every_third("SGD", wrap, dtype=dtype, bad={3: where})
    assert bool(found.isfinite().all())
    assert skips == [step == 1 and where == "second" for step in range(10)]
    # Batch 3 is skipped, or the step after batch 5, in whose window the scale was to grow.
    backed_off = [n for n, (a, b) in enumerate(pairwise(scales)) if b < a]
    assert backed_off == [3 if where == "first" else 5]


@pytest.mark.parametrize("how", ["grows", "backs off"])
def test_left_over_float16_gradients_at_the_ends_of_their_range(how: str) -> None:
    """They are what they would have been at the new scale: past the largest float16 the boundary
    skips, below the smallest normal one they are rounded once more."""
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1 if how == "grows" else 99)
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2))
    slope, bad = (40.0, 1.0) if how == "grows" else (2.0**-34 * 3, INF)  # a scaled 40960, 3 * 2^-24
    with (
        AsyncOptimizer(SGD([first], lr=0.25), scaler=scaler, mode="sync") as one,
        AsyncOptimizer(SGD([second], lr=0.25 if how == "grows" else 2.0**32), scaler=scaler) as two,
    ):
        scaler.scale(first.float().sum() * bad + second.float().sum() * slope).backward()
        one.step()
        one.zero_grad()
        scaler.scale(first.float().sum()).backward()
        assert second.grad is not None
        assert second.grad.tolist() == [INF if how == "grows" else 2.0**-23] * 2
        two.step()
        two.synchronize()
        assert two.step_was_skipped is (how == "grows")
        assert second.tolist() == [1.0 if how == "grows" else 1.0 - 2.0**32 * 2.0**-23 / 512] * 2


@faces
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_shared_gradient_that_the_other_optimizer_has_left(face: str, mode: str) -> None:
    """Its step has unscaled it, so nothing scaled may be added to it, whatever the scale is."""
    with wrapper(face, mode, "none", **STANDS) as wrap:
        own, shared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        model = nn.ParameterList([own, shared])
        _, first, second, scaler, backward = wrap(model, SGD([shared], lr=1.0), SGD(model, lr=1.0))
        for _ in range(2):
            backward((own + shared).sum())
            first.step()
        with pytest.raises(OrderError, match="which are unscaled"):
            second.step()
        second.zero_grad()
        scaler.abandon_window()
        backward((own + shared).sum())
        second.step()
        second.synchronize()
        assert own.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("which", ["each", "all", "first", "value"])
@pytest.mark.parametrize("fold", [False, True])
def test_a_clip_of_a_shared_parameter(mode: str, which: str, fold: bool) -> None:
    """It was unscaled once for each owner."""
    accelerator = attached(mode, fold_unscale=fold)
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    inner = [SGD([p, c], lr=0.125, momentum=0.5, fused=fold) for p in (a, b)]
    ours = [accelerator.prepare(o) for o in inner]
    accelerator.backward((a + b + c).sum())
    if which == "value":
        accelerator.clip_grad_value_([a, b, c], 1e6)
    else:
        sets = {"each": [[a, c], [b, c]], "all": [[a, b, c]], "first": [[a, c]]}[which]
        for params in sets:
            accelerator.clip_grad_norm_(params, 1e6)
    for each in ours:
        each.step()
    for each in ours:
        each.synchronize()
    for optimizer, p in zip(inner, (a, b), strict=True):
        assert optimizer.state[p]["momentum_buffer"].tolist() == [1.0, 1.0]
        assert optimizer.state[c]["momentum_buffer"].tolist() == [1.0, 1.0]
    assert (a.tolist(), c.tolist()) == ([0.875] * 2, [0.75] * 2)
    detach(accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("clip", ["norm", "value", "part", "none"])
def test_a_parameter_shared_with_an_optimizer_that_has_masters(mode: str, clip: str) -> None:
    """After a clip it was unscaled twice, and moved 1,024 times too little."""
    accelerator = attached(mode)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    shared, own = (nn.Parameter(torch.ones(2)) for _ in range(2))
    ours = [accelerator.prepare(SGD([p, shared], lr=0.125)) for p in (half, own)]
    accelerator.backward((half.float() + shared + own).sum())
    if clip == "none":
        for each in ours:
            each.step()
        for each in ours:
            each.synchronize()
        assert (half.tolist(), shared.tolist(), own.tolist()) == (
            [0.875] * 2,
            [0.75] * 2,
            [0.875] * 2,
        )
    else:
        every = [half, shared, own]
        call: Callable[[], Any] = {
            "norm": lambda: accelerator.clip_grad_norm_(every, 1e6),
            "value": lambda: accelerator.clip_grad_value_(every, 1e6),
            "part": ours[1].step,
        }[clip]
        if clip == "part":
            accelerator.clip_grad_norm_([half], 1e6)
        with pytest.raises(OrderError, match="shares 1 parameters with a SGD"):
            call()
        assert (half.tolist(), shared.tolist(), own.tolist()) == ([1.0] * 2,) * 3
        for p in every:
            p.grad = None
        accelerator.scaler.abandon_window()
    detach(accelerator)


ENDS: dict[str, Callable[[GradScaler], None]] = {
    "abandon_window": lambda scaler: scaler.abandon_window(),
    "backoff": lambda scaler: scaler.backoff(),
    "backoff, and a new scale": lambda scaler: (scaler.backoff(), scaler.update(64.0))[0],  # type: ignore[func-returns-value]
    "update(new_scale)": lambda scaler: scaler.update(64.0),
    "load_state_dict": lambda scaler: load_scale(scaler),
    "abandon_window, then load_state_dict": lambda scaler: (
        scaler.abandon_window(),  # type: ignore[func-returns-value]
        load_scale(scaler),
    )[0],
}


def load_scale(scaler: GradScaler) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})


@faces
@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize(
    ("end", "then"),
    [
        *product(ENDS, ["step"]),
        *product(["abandon_window"], ["clip", "scaler.step", "scaler.unscale_"]),
    ],
)
@pytest.mark.parametrize("clipped", [True, False])
def test_gradients_that_a_window_leaves_half_way(
    face: str, mode: str, end: str, clipped: bool, then: str
) -> None:
    """They are unscaled: torch moves 1,000 times too far without a word. Scaled, they go on
    accumulating at the new scale, as in a loop without scaling."""
    with loop(face, mode) as ours:

        def go_on() -> None:
            ours.backward(1)
            if then == "scaler.step":
                ours.scaler.step(ours.inner if face == "accelerate" else ours.optimizer)
                ours.scaler.update()
            elif then == "scaler.unscale_":
                ours.scaler.unscale_(ours.inner)
                ours.optimizer.step()
            else:
                if then == "clip":
                    ours.clip(1e6)
                ours.optimizer.step()
            ours.optimizer.synchronize()
            ours.optimizer.zero_grad()

        before = weights(ours.model)
        ours.backward(0)
        if clipped:
            ours.clip(1e6)
        ENDS[end](ours.scaler)
        reference = Plain()
        if not clipped:
            loss_of(reference.model, 0).backward()
        else:
            with pytest.raises(OrderError, match="go on"):
                go_on()
            assert torch.equal(weights(ours.model), before)
            ours.optimizer.zero_grad()
            ours.scaler.abandon_window()
        go_on()
        loss_of(reference.model, 1).backward()
        reference.inner.step()
        assert torch.allclose(weights(ours.model), weights(reference.model), atol=1e-6)


@pytest.mark.parametrize("clipped", [True, False])
def test_the_verdict_is_that_of_all_ranks(clipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's shard overflowed, ours did not."""
    asked: list[tuple[bool, bool]] = []

    def agree(found: bool, device: Any, sharded: bool) -> bool:
        asked.append((found, sharded))
        return True

    monkeypatch.setattr("accel_scaler.optimizer_step.overflow_check.agree_on_overflow", agree)
    p, scaler = nn.Parameter(torch.ones(2)), GradScaler("cpu", init_scale=SCALE)
    inner = SGD([p], lr=0.125)
    with AsyncOptimizer(inner, scaler=scaler, mode="sync", sharded=True) as ours:
        scaler.scale(p.sum()).backward()
        if clipped:
            ours.clip_grad_norm_(1.0)
        ours.step()
        assert ours.step_was_skipped
        assert (p.tolist(), scaler.get_scale()) == ([1.0, 1.0], SCALE / 2)
    assert asked == [(False, True)]


def test_an_optimizer_made_after_a_clip_finds_its_gradients_unscaled() -> None:
    accelerator, p = attached(), nn.Parameter(torch.ones(2))
    first = accelerator.prepare(SGD([p], lr=0.125))
    accelerator.backward(p.sum())
    accelerator.clip_grad_norm_([p], 1e6)
    second = accelerator.prepare(SGD([p], lr=0.25))
    first.step()
    second.step()
    assert p.tolist() == [0.625] * 2
    detach(accelerator)


def test_a_parameter_that_nobody_owns_is_unscaled_by_the_first_of_two_clips() -> None:
    accelerator, p, q = attached(), *(nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = accelerator.prepare(SGD([p], lr=0.125))
    accelerator.backward((p + q).sum())
    for _ in range(2):
        norm = float(accelerator.clip_grad_norm_([p, q], 1e6))
        assert norm == pytest.approx(2.0)
    optimizer.step()
    assert (p.tolist(), q.grad.tolist()) == ([0.875] * 2, [1.0] * 2)
    detach(accelerator)
