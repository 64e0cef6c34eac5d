"""float16 parameters train through float32 masters: every mode, with and without offload."""

from __future__ import annotations

import itertools
import pickle
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
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

HALF, BRAIN = torch.float16, torch.bfloat16
WAYS = list(itertools.product(("sync", "overlap", "delayed"), ("none", "cpu")))
TWO_WAYS = [("sync", "none"), ("delayed", "cpu")]


class Mixed(nn.Module):
    """A float16 layer, then a float32 one."""

    def __init__(self) -> None:
        super().__init__()
        first, _, last = network()
        self.first, self.last = first.half(), last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x)).float())
        return out


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


@pytest.mark.parametrize(("mode", "offload"), WAYS)
def test_float16_and_float32_parameters_side_by_side(mode: str, offload: str) -> None:
    ours = run_ours("adamw", mode, offload, make=Mixed, clip={"max_norm": 0.5})
    assert_same_run(ours, run_reference("adamw", late(mode), make=Mixed, max_norm=0.5))


@pytest.mark.parametrize("scale", [1000.0, 2.0**24])
def test_any_scale_that_fits(scale: float) -> None:
    """1000: not a power of two. 2**24: the backward itself overflows until it has backed off."""
    ours = run_ours("sgd", "overlap", make=half, scale=scale)
    assert_same_run(ours, run_reference("sgd", make=half, scale=scale))
    assert ours["scales"][-1] < 2.0**24


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


@pytest.mark.parametrize("make", [half, Mixed], ids=["float16", "mixed"])
def test_clip_grad_value_clips_the_unscaled_value(make: Any) -> None:
    """A limit that float16 holds (2**-4) is met exactly."""
    accelerator = attached("overlap")
    net = make()
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
    clipped = run_reference("sgd", make=make, autocast=True, max_value=2.0**-4)
    assert_same_run(seen, clipped)
    free = run_reference("sgd", make=make, autocast=True)
    assert not same(free["params"], clipped["params"])


def test_a_value_limit_above_float16_clips_nothing() -> None:
    """100 * 1024 is more than float16 holds; what is there is below it already."""
    accelerator = attached("sync")
    w = nn.Parameter(torch.zeros(1, dtype=HALF))
    optimizer = accelerator.prepare(torch.optim.SGD([w], lr=1.0))
    accelerator.backward((w.float() * 32.0).sum())
    accelerator.clip_grad_value_([w], 100.0)
    optimizer.step()
    assert w.item() == -32.0
    detach(accelerator)


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


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_bfloat16_with_offload_has_masters(mode: str) -> None:
    def brain() -> nn.Module:
        return network(BRAIN)

    ours = run_ours("sgd", mode, "cpu", make=brain, clip={"max_norm": 0.5})
    assert_same_run(ours, run_reference("sgd", late(mode), make=brain, max_norm=0.5))


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_bfloat16_without_offload_trains_as_torch_does(mode: str) -> None:
    ours, plain = network(BRAIN), network(BRAIN)
    stock_optimizer = OPTIMIZERS["adamw"](plain.parameters())
    inner = OPTIMIZERS["adamw"](ours.parameters())
    with AsyncOptimizer(inner, ours, mode=mode) as optimizer:
        for step in range(6):
            for model, stepper in ((ours, optimizer), (plain, stock_optimizer)):
                loss_of(model, step).backward()
                stepper.step()  # type: ignore[attr-defined]
                stepper.zero_grad()  # type: ignore[attr-defined]
        assert same(optimizer.state_dict(), stock_optimizer.state_dict())
    assert same([p.detach() for p in ours.parameters()], [p.detach() for p in plain.parameters()])


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_an_edit_of_a_parameter_reaches_its_master(mode: str) -> None:
    """Where the parameter did not change, the master keeps its low bits."""
    w = nn.Parameter(torch.ones(2, dtype=HALF))
    inner = torch.optim.SGD([w], lr=2.0**-13)
    with AsyncOptimizer(inner, mode=mode) as optimizer:
        w.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        with torch.no_grad():
            w[1] = 3.0
        w.float().sum().backward()
        optimizer.step()
        master = optimizer.state_dict()["state"][0]["master"]
    assert master.tolist() == [1.0 - 2 * 2.0**-13, 3.0 - 2.0**-13]


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


def test_a_frozen_float16_base_costs_no_engine_until_it_is_trained() -> None:
    accelerator = attached()
    w, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer = accelerator.prepare(torch.optim.SGD([w, b.requires_grad_(False)], lr=1e-3))
    for trained in (False, True):
        b.requires_grad_(trained)
        accelerator.backward(of_two(w, b, 0))
        optimizer.step()
        optimizer.zero_grad()
        assert (async_stepper_of(optimizer.optimizer) is not None) is trained
    pickle.loads(pickle.dumps(optimizer))
    detach(accelerator)
    assert async_stepper_of(optimizer.optimizer) is None
    assert not {"_attachment", "_hooks"} & set(vars(optimizer))


def test_masters_are_loaded_for_a_parameter_that_is_unfrozen_by_then() -> None:
    def begin(trained: bool) -> Any:
        accelerator = attached(max_scale=INIT_SCALE)
        w, b = nn.Parameter(torch.linspace(0.5, 1.0, 4)), nn.Parameter(torch.ones(4, dtype=HALF))
        b.requires_grad_(trained)
        optimizer = accelerator.prepare(torch.optim.SGD([w, b], lr=1e-3, momentum=0.9))
        return accelerator, w, b, optimizer

    def train(accelerator: Any, w: Tensor, b: Tensor, optimizer: Any, steps: range) -> None:
        for step in steps:
            accelerator.backward(of_two(w, b, step))
            optimizer.step()
            optimizer.zero_grad()

    first = accelerator, w, b, optimizer = begin(True)
    train(*first, range(3))
    saved = pickle.loads(pickle.dumps((optimizer.state_dict(), w.detach(), b.detach())))
    train(*first, range(3, 6))
    second = _, w2, b2, other = begin(False)
    b2.requires_grad_(True)
    with torch.no_grad():
        w2.copy_(saved[1])
        b2.copy_(saved[2])
    other.load_state_dict(saved[0])
    train(*second, range(3, 6))
    assert torch.equal(w2, w)
    assert torch.equal(b2, b)
    masters = [each.state_dict()["state"][1]["master"] for each in (optimizer, other)]
    assert torch.equal(*masters)
    for each in (accelerator, second[0]):
        detach(each)


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


def test_an_edit_while_the_first_overlapped_step_runs_comes_after_it() -> None:
    """The first step also learns the order of use, which moves parameters between parts."""
    model = two_layers()
    inner = torch.optim.SGD(list(model.parameters())[::-1], lr=0.25)
    with AsyncOptimizer(inner, model, offload="cpu") as optimizer:
        step_by_one(model, optimizer)
        write(model, 50.0)
        step_by_one(model, optimizer)
        optimizer.synchronize()
        assert elements(model) == [49.75]


@pytest.mark.parametrize(("mode", "offload", "warmup"), EDITED)
def test_an_edit_is_not_lost_where_a_group_is_added_after_it(
    mode: str, offload: str, warmup: int
) -> None:
    model = two_layers()
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    with AsyncOptimizer(
        inner, model, mode=mode, offload=offload, delay_warmup_steps=warmup
    ) as optimizer:
        step_by_one(model, optimizer)
        optimizer.synchronize()
        write(model, 70.0)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        step_by_one(model, optimizer)
        optimizer.synchronize()
        assert elements(model) == [69.75]
