"""``attach`` without a loss scale: stock's numbers, and no step where gradients are not finite."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from support import same
from torch import Tensor, nn

from accel_scaler import ConfigError, OrderError, OverflowStreakError, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = float("inf"), float("nan")
PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "no"])
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    state: Any
    lr: list[float]
    norms: list[float]
    grads: list[list[Tensor]]
    """After each clip."""
    skipped: list[bool]
    records: list[Any]


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def train(
    precision: str,
    settings: dict[str, Any] | None,
    *,
    kind: str = "sgd",
    accumulation: int = 1,
    clip: tuple[str, Any] | None = None,
    factors: dict[int, float] | None = None,
    dropped: Collection[int] = (),
    windows: int = 8,
) -> Outcome:
    """``settings``: None is stock. ``factors``: on the loss of some windows' last micro-batch."""
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    if settings is not None:
        attach(accelerator, **settings)
    net = network()
    optimizer = OPTIMIZERS[kind](net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    norms, grads, skipped = [], [], []
    for number, x in enumerate(batches(windows * accumulation)):
        window = number // accumulation
        if window in dropped:
            continue
        with accelerator.accumulate(model):
            loss = model(x).float().square().mean()
            if accelerator.sync_gradients:
                loss = loss * (factors or {}).get(window, 1.0)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                call, limit = clip
                found = getattr(accelerator, call)(net.parameters(), *limit)
                norms += [] if found is None else [float(found)]
                grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
            schedule.step()
            optimizer.zero_grad()
    records = [] if settings is None else list(accelerator.scaler_history.records)
    detach(accelerator)
    state = copy.deepcopy(optimizer.optimizer.state_dict()["state"])
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return Outcome(weights, state, schedule.get_last_lr(), norms, grads, skipped, records)


def assert_equal(ours: Outcome, other: Outcome) -> None:
    assert same(ours.weights, other.weights)
    assert same(ours.state, other.state)
    assert ours.lr == other.lr


@PRECISIONS
@pytest.mark.parametrize(
    ("accumulation", "clip"),
    [
        (1, None),
        (2, ("clip_grad_norm_", (0.05,))),
        (1, ("clip_grad_norm_", (0.05, 1.0))),
        (2, ("clip_grad_value_", (0.01,))),
    ],
    ids=str,
)
def test_finite_windows_are_stocks(precision: str, accumulation: int, clip: Any) -> None:
    """In ``overlap`` and with bfloat16 weights: the random histories."""
    for kind in OPTIMIZERS:
        given: Any = {"kind": kind, "accumulation": accumulation, "clip": clip}
        ours, stock = train(precision, {}, **given), train(precision, None, **given)
        assert_equal(ours, stock)
        assert ours.norms == stock.norms
        assert same(ours.grads, stock.grads)
        assert [r.skipped for r in ours.records] == [False] * 8
        assert {r.scale for r in ours.records} == {1.0}


@pytest.mark.parametrize("precision", ["bf16", "no", "fp16"])
@pytest.mark.parametrize(
    ("mode", "limit", "clip"),
    [("sync", "8x", None), ("overlap", 40.0, ("clip_grad_norm_", (0.05,)))],
)
def test_a_spike_is_skipped(precision: str, mode: str, limit: float | str, clip: Any) -> None:
    """With accumulation it is the norm of the whole window."""
    scale: Any = {"init_scale": 16.0, "growth_interval": 1000} if precision == "fp16" else {}
    given: Any = {"windows": 22, "clip": clip, "accumulation": 2}
    settings: Any = {"step_mode": mode, **scale, "skip_norm_above": limit}
    spiked = train(precision, settings, factors={18: 1000.0, 20: 500.0}, **given)
    assert_equal(spiked, train(precision, settings, dropped=(18, 20), **given))
    assert [n for n, is_skipped in enumerate(spiked.skipped) if is_skipped] == [18, 20]
    assert [r.index for r in spiked.records if r.spike] == [18, 20]
    assert not any(r.found_inf for r in spiked.records)
    assert {r.next_scale for r in spiked.records} == {scale.get("init_scale", 1.0)}


def test_a_spike_in_a_sparse_gradient_is_skipped() -> None:
    accelerator: Any = Accelerator(cpu=True)
    attach(accelerator, skip_norm_above=5.0)
    table, skipped = nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), []
    model, optimizer = accelerator.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
    for factor in (1.0, 100.0, NAN):
        accelerator.backward(model(torch.tensor([[1, 1]])).sum() * factor)  # norm 4: uncoalesced
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    records = list(accelerator.scaler_history.records)
    detach(accelerator)
    assert skipped == [False, True, True]
    assert [r.spike for r in records] == [False, True, False]


def test_too_many_skips_end_the_run_in_every_precision() -> None:
    with pytest.raises(OverflowStreakError, match="2 steps in a row were skipped") as caught:
        train("bf16", {"max_consecutive_skips": 1}, factors={2: NAN, 4: NAN, 5: NAN})
    assert "Step 4: loss (float32), micro-batch 0: contains NaN" in str(caught.value)
    assert "scale" not in str(caught.value)


# What stock loops do where nothing is scaled, and no random history does.


@pytest.fixture
def loop() -> Iterator[Any]:
    made: list[Any] = []

    def make(settings: dict[str, Any] | None = None) -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision="no")
        if settings is not None:
            attach(accelerator, **settings)
        net = network()
        parts = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        made.append(accelerator)
        return accelerator, *parts

    yield make
    for accelerator in made:
        detach(accelerator)


def plain_backward(accelerator: Any, model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def clip_twice_around_a_backward(accelerator: Any, model: Any, optimizer: Any, x: Tensor) -> None:
    for _ in range(2):
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def closure(accelerator: Any, model: Any, optimizer: Any, x: Tensor) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        found: Tensor = model(x).square().mean()
        accelerator.backward(found)
        return found

    optimizer.step(loss)


def clip_with_strangers(accelerator: Any, model: Any, optimizer: Any, x: Tensor) -> None:
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.full((3,), 2.0)
    accelerator.backward(model(x).square().mean())
    accelerator.clip_grad_norm_([*model.parameters(), stranger], 0.05)
    accelerator.clip_grad_value_([*model.parameters(), stranger], 0.02)
    assert stranger.grad.max() <= 0.02
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        *product(("sync", "overlap"), (clip_twice_around_a_backward, clip_with_strangers)),
        ("sync", closure),
    ],
)
def test_a_loop_of_stock_runs_as_it_is(loop: Any, step: Any, mode: str) -> None:
    found = []
    for attached in ({"step_mode": mode}, None):
        accelerator, model, optimizer = loop(attached)
        for x in batches(5):
            step(accelerator, model, optimizer, x)
        found.append((model.state_dict(), optimizer.state_dict()))
    assert same(found[0], found[1])


def test_a_stranger_that_is_not_finite_skips_the_step(loop: Any) -> None:
    accelerator, model, optimizer = loop({})
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.full((3,), NAN)
    before = copy.deepcopy(model.state_dict())
    accelerator.backward(model(batches(1)[0]).square().mean())
    accelerator.clip_grad_norm_([*model.parameters(), stranger], 0.05)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert same(before, model.state_dict())


def test_what_a_backward_of_the_loops_own_adds_after_a_clip_is_checked() -> None:
    accelerator: Any = attach(Accelerator(cpu=True))
    p = nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(torch.optim.SGD([p], lr=0.5))
    p.sum().backward()
    accelerator.clip_grad_norm_([p], 1e6)
    (p * NAN).sum().backward()
    optimizer.step()
    assert (p.tolist(), optimizer.step_was_skipped) == ([1.0, 1.0], True)
    detach(accelerator)


@pytest.mark.parametrize(("clipped", "kind"), [(1, 1.0), (2, -INF)])
def test_a_norm_that_is_finite_beside_infinity_is_no_check(clipped: int, kind: float) -> None:
    """That of one parameter alone, or of the smallest elements."""
    accelerator: Any = attach(Accelerator(cpu=True))
    params = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]
    optimizer = accelerator.prepare(torch.optim.SGD(params, lr=0.5))
    accelerator.backward(params[0].sum() + (params[1] * torch.tensor([1.0, INF])).sum())
    assert float(accelerator.clip_grad_norm_(params[:clipped], 1e6, kind)) == 1.0
    optimizer.step()
    assert optimizer.step_was_skipped
    assert [p.tolist() for p in params] == [[1.0], [1.0, 1.0]]
    detach(accelerator)


def test_a_backward_after_a_clip_that_is_left_to_the_step_is_refused() -> None:
    """Of gradients that go to masters; the clip would be lost."""
    accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="bf16"), master_weights="fp32")
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = accelerator.prepare(torch.optim.SGD([p], lr=0.5))
    accelerator.backward(p.sum())
    accelerator.clip_grad_norm_([p], 0.125)
    accelerator.backward(p.sum())
    with pytest.raises(OrderError, match="changed after they were clipped"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]
    detach(accelerator)


class WithoutGradients(torch.optim.SGD):
    """Moves parameters by what it finds out itself, as zeroth-order optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(0.5)


def test_a_step_without_gradients_is_the_optimizers() -> None:
    accelerator: Any = Accelerator(cpu=True)
    attach(accelerator)
    net = nn.Linear(1, 1, bias=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(
        made := WithoutGradients(net.parameters(), lr=1.0), 0.5
    )
    called: list[Any] = []
    made.register_step_post_hook(lambda *_: called.append(1))
    optimizer, schedule = accelerator.prepare(made, schedule)
    before = net.weight.item()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    detach(accelerator)
    assert net.weight.item() == pytest.approx(before + 1.5)
    assert (len(called), schedule.get_last_lr()) == (3, [0.125])


def test_a_checkpoint_is_stocks(tmp_path: Path, loop: Any) -> None:
    """Either one's is loaded by the other."""
    for first, second in (({}, None), (None, {})):
        accelerator, model, optimizer = loop(first)
        for x in batches(3):
            plain_backward(accelerator, model, optimizer, x)
        accelerator.save_state(str(tmp_path / "saved"))
        assert accelerator.scaler is None
        other, resumed, its_optimizer = loop(second)
        other.load_state(str(tmp_path / "saved"))
        for each in ((accelerator, model, optimizer), (other, resumed, its_optimizer)):
            plain_backward(*each, batches(4)[3])
        assert same(model.state_dict(), resumed.state_dict())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_scale": 64.0}, "init_scale=64"),
        ({"hysteresis": 2, "min_scale": 1.0}, "leave out min_scale, hysteresis"),
        ({"heal": True}, "heal=True"),
    ],
    ids=str,
)
@PRECISIONS
def test_a_setting_of_the_scale_is_refused_by_name(
    precision: str, settings: dict[str, Any], named: str
) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    with pytest.raises(ConfigError, match=named):
        attach(accelerator, **settings)
    assert type(accelerator) is Accelerator


def test_fp16_cannot_do_without_the_guard() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(ConfigError, match="skip_nonfinite=False"):
        attach(accelerator, skip_nonfinite=False)
    assert type(accelerator) is Accelerator
