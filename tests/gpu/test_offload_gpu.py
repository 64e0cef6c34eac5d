"""State that rests in host memory: bits, order of copies, memory, reads, refusals.

The reference is the same run without offload on the same device, with float32 masters.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerators import DEVICE, KIND, adamw, fused_adamw, is_simulated, module, synchronize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accel_scaler import AsyncOptimizer, GradScaler, StepError, UnsupportedError, attach, detach
from accel_scaler.optimizer_step import offloaded
from accel_scaler.optimizer_step.masters import ParameterPair
from accel_scaler.optimizer_step.ring import Ring
from accel_scaler.selftest import sizes

STEPS, OVERFLOW = 8, 4
WORDS = 70
WIDE, LAYERS = 512, 6
"""A layer has a stretch of its own."""

AUTO: dict[str, Any] = {"offload": "cpu"}
RING: dict[str, Any] = {"offload": "cpu", "offload_budget": 0}
KEPT: dict[str, Any] = {"offload": "cpu", "offload_budget": "8KiB"}


def fused_sgd(params: Any) -> Any:
    """The first step is unlike others."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, fused=True)


def amsgrad(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01, amsgrad=True, fused=True)


def rmsprop(params: Any) -> Any:
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True)


def adagrad(params: Any) -> Any:
    """Its state is made in ``__init__``."""
    return torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1)


def nadam(params: Any) -> Any:
    """It has two numbers a parameter."""
    return torch.optim.NAdam(params, lr=0.01)


def plain_sgd(params: Any) -> Any:
    """It has no state."""
    return torch.optim.SGD(params, lr=0.1)


OPTIMIZERS = (adamw, fused_adamw, fused_sgd, plain_sgd, amsgrad, rmsprop, adagrad, nadam)


class Net(nn.Module):
    """An embedding in some pieces, small parameters, and activations far larger than all state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        found: Tensor = self.head(self.norm(x))
        return found


def words(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (16, 64), generator=generator).to(DEVICE)


class Run:
    """A loop, by hand; ``seen`` has its losses and norms."""

    def __init__(
        self,
        make: Callable[[Any], Any] = fused_adamw,
        dtype: torch.dtype = torch.float32,
        *,
        scaled: bool = False,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = Net()
        self.net: Any = net.to(DEVICE, dtype)
        self.inner = make(self.net.parameters())
        self.scaler = GradScaler(KIND, init_scale=1024.0, growth_interval=3) if scaled else None
        settings = {"master_weights": "auto" if "offload" in settings else "fp32"} | settings
        self.optimizer: Any = AsyncOptimizer(
            self.inner, self.net, scaler=self.scaler, step_mode="sync", **settings
        )
        self.seen: list[Any] = []

    def backward(self, step: int) -> None:
        batch = words(step)
        loss = F.cross_entropy(self.net(batch).float().flatten(0, 1), batch.flatten())
        self.seen.append(loss.detach())
        if self.scaler is not None:
            loss = self.scaler.scale(loss * float("inf") if step == OVERFLOW else loss)
        loss.backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.finish()

    def finish(self) -> None:
        self.seen.append(self.optimizer.clip_grad_norm_(0.5))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        """Parameters and the state dict, in lists."""
        saved = self.optimizer.state_dict()["state"]
        entries = [(n, k, e[k]) for n, e in sorted(saved.items()) for k in sorted(e)]
        return [*[p.detach() for p in self.net.parameters()], *entries]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def assert_equal_runs(
    play: Callable[[Run], object], make: Any, settings: dict[str, Any], **kind: Any
) -> None:
    found = []
    for mine in ({}, settings):
        run = Run(make, **kind, **mine)
        play(run)
        found.append((run.seen, run.state()))
        run.optimizer.close()
        found[-1] += (dict(run.inner.state_dict()["state"]),)
    assert equal(found[0][0], found[1][0]), "losses and norms"
    assert equal(found[0][1], found[1][1]), "parameters and state"
    after = [[(n, sorted(e.items())) for n, e in sorted(each[2].items())] for each in found]
    assert equal(after[0], after[1]), "the state that torch gets back"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is cut into pieces, or some are joined."""
    monkeypatch.setattr(offloaded, "SMALLEST_BLOCK", 512)
    monkeypatch.setattr(offloaded, "BLOCKS", 1 << 30)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the ring does, and where the script is."""
    found: list[str] = []
    load, store = Ring.load, Ring.store

    def logged_load(self: Ring, stretch: Any) -> None:
        found.append("load")
        load(self, stretch)

    def logged_store(self: Ring, stretch: Any) -> None:
        found.append("store")
        store(self, stretch)

    monkeypatch.setattr(Ring, "load", logged_load)
    monkeypatch.setattr(Ring, "store", logged_store)
    return found


# Bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_thread_may_save_at_any_moment(dtype: torch.dtype) -> None:
    """It waits for a step under way, and what came up early comes up again."""

    def play(run: Run) -> None:
        is_over, errors = threading.Event(), []

        def save() -> None:
            while not is_over.wait(0.002):
                try:
                    run.optimizer.state_dict()
                except Exception as error:
                    errors.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        try:
            for step in range(STEPS):
                run.step(step)
        finally:
            is_over.set()
            thread.join()
        assert errors == []

    assert_equal_runs(play, fused_adamw, AUTO, dtype=dtype)


@pytest.mark.parametrize("make", [fused_sgd, rmsprop, fused_adamw])
@pytest.mark.parametrize("settings", [AUTO, RING, KEPT])
def test_a_parameter_whose_first_gradient_comes_late(make: Any, settings: dict[str, Any]) -> None:
    """Its neighbours in a stretch have state by then."""

    def play(run: Run) -> None:
        for step in range(STEPS):
            run.backward(step)
            for p in (run.net.layers[2].bias, run.net.norm.weight) if step < 3 else ():
                p.grad = None
            run.finish()

    assert_equal_runs(play, make, settings, dtype=torch.bfloat16)


@pytest.mark.parametrize("settings", [AUTO, RING, KEPT], ids=["auto", "ring", "kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_offload_equals_no_offload(make: Any, dtype: torch.dtype, settings: Any) -> None:
    def play(run: Run) -> None:
        for step in range(STEPS):
            run.step(step)

    assert_equal_runs(play, make, settings, dtype=dtype, scaled=dtype is torch.float16)


def accumulates(run: Run) -> None:
    for step in range(6):
        run.backward(2 * step)
        run.step(2 * step + 1)


def freezes(run: Run) -> None:
    for step in range(STEPS):
        run.net.layers[2].weight.requires_grad_(step % 3 != 1)
        run.step(step)


def leaves_some_out(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        if step % 2:
            run.net.embedding.weight.grad = None
        run.finish()


def adds_a_group(run: Run) -> None:
    extra = nn.Parameter(torch.ones(WORDS, device=DEVICE, dtype=run.net.head.bias.dtype))
    for step in range(STEPS):
        if step == 3:
            run.optimizer.add_param_group({"params": [extra], "lr": 0.03})
        run.backward(step)
        if step > 2:
            extra.grad = torch.full_like(extra, 0.01 * step)
        run.finish()


def edits(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        if step == 3:
            with torch.no_grad():
                run.net.embedding.weight.clamp_(-0.5, 0.5)
        if step == 5:
            run.net.head.weight.data[::2].mul_(0.5)
        if step == 6:
            run.optimizer.param_groups[0]["lr"] = 0.003
        run.finish()


def edits_what_has_no_gradient(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        if step in (3, 5):
            weight = run.net.head.weight
            weight.grad = None
            with torch.no_grad():
                (weight if step == 3 else weight.data).mul_(0.5)
        run.finish()


def edits_state(run: Run) -> None:
    """Between the backward, in which it may be up already, and the step."""
    for step in range(STEPS):
        run.backward(step)
        entries = run.inner.state
        if step == 3:
            entries[run.net.head.weight]["exp_avg"].zero_()
        if step == 4:
            entries[run.net.norm.weight]["exp_avg_sq"].data.mul_(2.0)
        if step == 5:
            del entries[run.net.layers[0].weight]
        if step == 6:
            entry = entries[run.net.embedding.weight]
            entry["exp_avg"] = entry["exp_avg"].clone().neg_()
        run.finish()


def edits_state_that_it_holds(run: Run) -> None:
    """It asks no optimizer, but the device is done with all copies by then."""
    for step in range(STEPS):
        if step == 2:
            held = [run.inner.state[p]["exp_avg"] for p in run.net.parameters()]
        run.backward(step)
        if step == 5:
            synchronize()
            torch._foreach_mul_(held, -2.0)
        run.finish()


def saves_and_loads(run: Run) -> None:
    saved: Any = None
    for step in range(STEPS):
        run.backward(step)
        if step == 3:
            saved = copy.deepcopy((run.net.state_dict(), run.optimizer.state_dict()))
        if step == 5:
            run.net.load_state_dict(saved[0])
            run.optimizer.load_state_dict(saved[1])
        run.finish()


def empties_the_cache(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        torch.accelerator.empty_cache()
        run.finish()


def lays_gradients_out_otherwise(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        for p in run.net.parameters():
            if p.ndim == 2:
                p.grad = p.grad.t().contiguous().t()
        run.finish()


def compiles(run: Run) -> None:
    run.net.compile(backend="aot_eager")  # the simulated device has no inductor
    for step in range(STEPS):
        run.step(step)


@pytest.mark.parametrize(
    "play",
    [
        *(accumulates, freezes, leaves_some_out, adds_a_group, edits, edits_state, compiles),
        *(edits_what_has_no_gradient, edits_state_that_it_holds, saves_and_loads),
        *(empties_the_cache, lays_gradients_out_otherwise),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_script_does_the_same_with_and_without(
    play: Callable[[Run], None], dtype: torch.dtype
) -> None:
    # torch's fused kernel takes no notice of strides.
    make = adamw if play is lays_gradients_out_otherwise else fused_adamw
    assert_equal_runs(play, make, AUTO, dtype=dtype, scaled=dtype is torch.float16)


def edits_a_few(run: Run) -> None:
    """After one edit that is found, of few elements, which no sample tells."""
    weight = run.net.embedding.weight
    weight.data = weight.data.repeat(4, 1)  # more elements than are compared one by one
    for step in range(STEPS):
        run.backward(step)
        if step == 2:
            weight.data.mul_(0.5)
        if step > 4:
            weight.data[1, :2].add_(0.25)
        run.finish()


def test_masters_take_few_elements_of_a_tensor_that_was_edited_before() -> None:
    assert_equal_runs(edits_a_few, fused_adamw, AUTO, dtype=torch.bfloat16)


@pytest.mark.parametrize("counted", [True, False])
def test_edits_do_not_keep_the_host_busy(
    counted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, refreshed = Run(dtype=torch.bfloat16, **AUTO), 0

    def refresh(pair: ParameterPair) -> None:
        nonlocal refreshed
        refreshed += 1
        original(pair)

    original = ParameterPair.refresh
    monkeypatch.setattr(ParameterPair, "refresh", refresh)
    run.step(0)
    weight = run.net.head.weight
    with torch.no_grad():
        (weight if counted else weight.data).mul_(0.5)
    for step in range(1, 4):
        run.step(step)
    assert refreshed == 0
    assert ("torch counts no version" in caplog.text) is not counted


@pytest.mark.parametrize("there_and_back", [(AUTO, {}), ({}, AUTO)], ids=["from", "to"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_from_one_to_the_other(dtype: torch.dtype, there_and_back: Any) -> None:
    whole = Run(dtype=dtype)
    for step in range(STEPS):
        whole.step(step)
    first, second = (Run(dtype=dtype, **settings) for settings in there_and_back)
    for step in range(4):
        first.step(step)
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(pickle.loads(pickle.dumps(first.optimizer.state_dict())))
    first.optimizer.close()
    for step in range(4, STEPS):
        second.step(step)
    assert equal(second.state(), whole.state())


def test_numbers_that_torch_has_cast_to_the_parameters_dtype_are_float32_again() -> None:
    """As in a checkpoint of the torch optimizer, which casts all but the steps."""

    def goes_on(run: Run) -> None:
        run.step(0)
        saved = run.optimizer.state_dict()
        for entry in saved["state"].values():
            del entry["master"]
            entry["mu_product"] = entry["mu_product"].bfloat16()
        run.optimizer.load_state_dict(saved)
        for step in range(1, STEPS):
            run.step(step)

    assert_equal_runs(goes_on, nadam, AUTO, dtype=torch.bfloat16)


def test_a_checkpoint_with_masters_of_float32_parameters_loads() -> None:
    """As offload wrote them while it stepped in host memory."""
    whole, first, second = Run(), Run(), Run(**AUTO)
    for step in range(STEPS):
        whole.step(step)
    for step in range(4):
        first.step(step)
    saved = first.optimizer.state_dict()
    for number, p in enumerate(first.net.parameters()):
        saved["state"][number] = {**saved["state"][number], "master": p.detach().cpu().clone()}
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(saved)
    for step in range(4, STEPS):
        second.step(step)
    assert equal(second.state(), whole.state())


# What travels when.


@pytest.mark.usefixtures("memory_counter")
def test_state_comes_up_in_the_backward_and_its_store_is_not_awaited(log: list[str]) -> None:
    run = Run(**AUTO)
    for step in range(4):
        run.step(step)
    log.clear()
    run.backward(4)
    early = log.count("load")
    assert early, "some stretches come up before the step"
    assert "store" not in log
    run.finish()
    assert log.count("load") == log.count("store") == len(stretches(run))
    assert run.optimizer._stepper.replica.ring.held, "slots still go down"
    log.clear()
    run.backward(5)
    assert log.count("load") == early


def stretches(run: Run) -> list[Any]:
    found: list[Any] = run.optimizer._stepper.replica.stretches
    return found


def test_the_ring_alone_loads_in_the_step(log: list[str]) -> None:
    run = Run(**RING)
    for step in range(4):
        run.backward(step)
        assert not log
        run.finish()
        most = 0
        for what in log:
            most += 1 if what == "load" else -1
            assert most <= 4, "four slots"
        log.clear()
        assert run.optimizer._stepper.replica.ring.held == 0


@pytest.mark.usefixtures("memory_counter")
def test_a_skip_stores_nothing(log: list[str]) -> None:
    run = Run(scaled=True, **AUTO)
    for step in range(OVERFLOW):
        run.step(step)
    log.clear()
    run.step(OVERFLOW)
    assert run.optimizer.step_was_skipped
    assert set(log) == {"load"}


@pytest.mark.usefixtures("memory_counter")
def test_after_two_wrong_guesses_nothing_comes_up_early(log: list[str]) -> None:
    run = Run(**AUTO)
    for step in range(4):
        run.step(step)
    counts = []
    for step in range(4, 12, 2):
        log.clear()
        run.backward(step)  # no step follows it
        counts.append(log.count("load"))
        run.backward(step + 1)
        run.finish()
    assert [bool(count) for count in counts] == [True, True, False, False]


def after_closing(run: Run) -> dict[str, Tensor]:
    run.optimizer.close()
    found: dict[str, Tensor] = [*dict.values(run.inner.state)][-1]
    return found


READS: dict[str, Callable[[Run], dict[str, Tensor]]] = {
    "[]": lambda run: run.inner.state[run.net.head.bias],
    "get": lambda run: run.inner.state.get(run.net.head.bias),
    "setdefault": lambda run: run.inner.state.setdefault(run.net.head.bias, {}),
    "pop": lambda run: run.inner.state.pop(run.net.head.bias),
    "popitem": lambda run: run.inner.state.popitem()[1],
    "items": lambda run: [*run.inner.state.items()][-1][1],
    "values": lambda run: [*run.inner.state.values()][-1],
    "iter": lambda run: dict.__getitem__(run.inner.state, [*run.inner.state][-1]),
    "copy": lambda run: [*run.inner.state.copy().values()][-1],
    "copy.copy": lambda run: [*copy.copy(run.inner.state).values()][-1],
    "deepcopy": lambda run: [*copy.deepcopy(run.inner.state).values()][-1],
    "state_dict": lambda run: [*run.optimizer.state_dict()["state"].values()][-1],
    "the wrapped state_dict": lambda run: [*run.inner.state_dict()["state"].values()][-1],
    "close": after_closing,
}
"""Of the entry of the last parameter."""


@pytest.fixture
def slow_third_step() -> Iterator[tuple[Callable[[Run], None], Tensor]]:
    """A function for the third of three steps, after which copies down take long; and what the
    last parameter's ``exp_avg`` is then."""
    reference = Run()
    for step in range(3):
        reference.step(step)

    def last_step(run: Run) -> None:
        synchronize()
        module().set_cost(down_gbps=0.0005)
        run.step(2)

    yield last_step, reference.inner.state[reference.net.head.bias]["exp_avg"].cpu()
    module().set_cost()


needs_slow_copies = pytest.mark.skipif(not is_simulated(), reason="needs copies that are slow")


@needs_slow_copies
@pytest.mark.parametrize(
    ("settings", "read"),
    [(AUTO, read) for read in READS] + [(RING, "[]")],
    ids=[*READS, "ring"],
)
def test_a_read_waits_for_copies_down(
    settings: dict[str, Any], read: str, slow_third_step: tuple[Callable[[Run], None], Tensor]
) -> None:
    last_step, expected = slow_third_step
    run = Run(**settings)
    for step in range(2):
        run.step(step)
    last_step(run)
    assert equal(READS[read](run)["exp_avg"], expected)


@needs_slow_copies
def test_dropped_memory_waits_for_copies_down(
    slow_third_step: tuple[Callable[[Run], None], Tensor],
) -> None:
    """Else a copy would end in memory that is another's by then."""
    last_step, expected = slow_third_step
    run = Run(**AUTO)
    for step in range(2):
        run.step(step)
    held = run.inner.state[run.net.head.bias]["exp_avg"]
    last_step(run)
    del run
    gc.collect()
    assert equal(held, expected)


@pytest.mark.parametrize("method", ["load", "store"])
@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_in_a_copy_leaves_memory_in_order(
    monkeypatch: pytest.MonkeyPatch, method: str, begun: bool
) -> None:
    run = Run(**AUTO)
    for step in range(3):
        run.step(step)
    real, calls = getattr(Ring, method), iter(range(10000))

    def interrupted(self: Ring, *args: Any) -> None:
        stops = next(calls) == 3
        if begun or not stops:
            real(self, *args)
        if stops:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ring, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step(3)
    monkeypatch.setattr(Ring, method, real)
    run.optimizer.zero_grad()
    for step in range(5, STEPS):
        run.step(step)
    run.optimizer.close()
    assert run.optimizer._stepper.replica.ring.held == 0


def test_after_a_step_that_fails_masters_are_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(dtype=torch.float16, **AUTO)
    for step in range(3):
        run.step(step)
    store, calls = Ring.store, iter(range(100))

    def fails(self: Ring, stretch: Any) -> None:
        if next(calls) == 4:
            raise RuntimeError("on purpose")
        store(self, stretch)

    monkeypatch.setattr(Ring, "store", fails)
    run.backward(3)
    with pytest.raises(StepError, match="on purpose"):
        run.optimizer.step()
    monkeypatch.setattr(Ring, "store", store)
    run.optimizer.zero_grad()
    saved = run.optimizer.state_dict()["state"]
    for number, p in enumerate(run.net.parameters()):
        assert torch.equal(saved[number]["master"].half(), p.detach().cpu())
    run.step(4)


# Memory.


def peak_of(steps: Callable[[], Callable[[int], None]]) -> int:
    """The bytes at the peak of steps, over what there was before they were made."""
    gc.collect()
    synchronize()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    step = steps()
    for number in range(STEPS):
        step(number)
    return torch.accelerator.max_memory_allocated(DEVICE) - before


SLACK = 512 * 64
"""Bytes: state dicts, and the counts of parameters."""


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize(
    "micro_batches", [[1], [3], [1, 1, 1, 1, 2, 2]], ids=["1", "3", "1, then 2"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_that_of_the_ring(dtype: torch.dtype, micro_batches: list[int]) -> None:
    """Also where state has come up for a step, and another forward comes."""

    def steps(settings: dict[str, Any]) -> Callable[[int], None]:
        run = Run(dtype=dtype, **settings)

        def step(number: int) -> None:
            count = micro_batches[number % len(micro_batches)]
            for micro_batch in range(count):
                run.backward(number * count + micro_batch)
            run.finish()

        return step

    ring, auto = (peak_of(partial(steps, settings)) for settings in (RING, AUTO))
    assert auto <= ring + SLACK


class Layers(nn.Module):
    """``checkpoint``: each layer is run again in the backward, by reentrant checkpointing."""

    def __init__(self, checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpoint else layer(x)
            x = x.relu()
        return x


def optimizer_of(net: nn.Module, settings: dict[str, Any]) -> Any:
    return AsyncOptimizer(fused_adamw(net.parameters()), net, step_mode="sync", **settings)


def train(net: nn.Module, optimizer: Any, rows: int, noise: Tensor | float = 0.0) -> None:
    x = torch.randn(rows, 64, device=DEVICE, requires_grad=True)
    (net(x) - noise).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_turn(settings: dict[str, Any]) -> Callable[[int], None]:
    """Two models are trained in turn."""
    nets = [Layers().to(DEVICE) for _ in range(2)]
    optimizers = [optimizer_of(net, settings) for net in nets]

    def step(_: int) -> None:
        for net, optimizer, rows in zip(nets, optimizers, (64, 600), strict=True):
            train(net, optimizer, rows)

    return step


def beside_another(settings: dict[str, Any]) -> Callable[[int], None]:
    """Between two steps a model is trained of which offload knows nothing."""
    net, other = Layers().to(DEVICE), Layers().to(DEVICE)
    optimizer, plain = optimizer_of(net, settings), torch.optim.SGD(other.parameters(), lr=0.1)

    def step(_: int) -> None:
        train(net, optimizer, 500)
        train(other, plain, 500)

    return step


def with_a_teacher(settings: dict[str, Any]) -> Callable[[int], None]:
    net, teacher = Layers().to(DEVICE), Layers().to(DEVICE)
    optimizer = optimizer_of(net, settings)

    def step(_: int) -> None:
        with torch.no_grad():
            noise = teacher(torch.randn(2000, 64, device=DEVICE))[:500]
        train(net, optimizer, 500, noise)

    return step


def checkpointed(settings: dict[str, Any]) -> Callable[[int], None]:
    net = Layers(checkpoint=True).to(DEVICE)
    optimizer = optimizer_of(net, settings)
    return lambda _: train(net, optimizer, 2000)


def out_of_proportion(settings: dict[str, Any]) -> Callable[[int], None]:
    """A short and then a long target."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Layers(), Layers()

        def forward(self, source: int, target: int) -> Tensor:
            hidden = self.encoder(torch.randn(source, 64, device=DEVICE)).mean(0)
            found: Tensor = self.decoder(hidden.expand(target, 64) * 1.0)
            return found

    net = Translator().to(DEVICE)
    optimizer = optimizer_of(net, settings)

    def step(number: int) -> None:
        net(*((900, 200) if number % 2 else (200, 900))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def part_evaluated(settings: dict[str, Any]) -> Callable[[int], None]:
    """A part of the model is called between two steps."""
    net = Layers().to(DEVICE)
    optimizer = optimizer_of(net, settings)

    def step(_: int) -> None:
        train(net, optimizer, 500)
        with torch.no_grad():
            net.layers[0](torch.randn(4000, 64, device=DEVICE))

    return step


def evaluated(settings: dict[str, Any]) -> Callable[[int], None]:
    """Once, on more than it trains on."""
    net = Layers().to(DEVICE)
    optimizer = optimizer_of(net, settings)

    def step(number: int) -> None:
        train(net, optimizer, 500)
        if number == 5:
            with torch.no_grad():
                net(torch.randn(4000, 64, device=DEVICE))

    return step


def skipped_beside_another(settings: dict[str, Any]) -> Callable[[int], None]:
    """Between a skip and the next forward a model is trained of which offload knows nothing."""
    net, other = Layers().to(DEVICE), Layers().to(DEVICE)
    optimizer, plain = optimizer_of(net, settings), torch.optim.SGD(other.parameters(), lr=0.1)

    def step(number: int) -> None:
        if number < 4:
            train(net, optimizer, 1000)
            return
        net(torch.randn(1000, 64, device=DEVICE)).square().mean().backward()
        optimizer.skip_step()
        optimizer.zero_grad()
        train(other, plain, 1500)

    return step


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize(
    "make",
    [
        *(in_turn, beside_another, with_a_teacher, checkpointed, out_of_proportion),
        *(part_evaluated, evaluated, skipped_beside_another),
    ],
)
def test_the_peak_is_that_of_the_ring_also(
    make: Callable[[dict[str, Any]], Callable[[int], None]],
) -> None:
    ring, auto = (peak_of(partial(make, settings)) for settings in (RING, AUTO))
    assert auto <= ring + SLACK


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize("make", [adamw, fused_adamw])
def test_the_peak_has_room_for_what_a_step_takes_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """Activations have left room for some stretches."""
    monkeypatch.setattr(offloaded, "SMALLEST_BLOCK", WIDE * WIDE)

    def steps(settings: dict[str, Any]) -> Callable[[int], None]:
        layers = [each for _ in range(8) for each in (nn.Linear(WIDE, WIDE, bias=False), nn.ReLU())]
        net = nn.Sequential(*layers).to(DEVICE)
        optimizer = AsyncOptimizer(make(net.parameters()), net, step_mode="sync", **settings)

        def step(_: int) -> None:
            net(torch.randn(800, WIDE, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    ring, auto = (peak_of(partial(steps, settings)) for settings in (RING, AUTO))
    assert auto <= ring + SLACK


@pytest.mark.parametrize("budget", [4 << 10, 8 << 10, 32 << 10])
def test_no_more_than_the_budget_stays_on_the_device(budget: int) -> None:
    run = Run(offload="cpu", offload_budget=budget)
    for step in range(2):
        run.step(step)
    values = [v for entry in run.inner.state.values() for v in entry.values() if v.ndim > 0]
    kept = sum(v.nbytes for v in values if v.device.type == DEVICE.split(":")[0])
    assert 0 < kept <= budget


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (torch.float16, 12)])
def test_host_memory_is_that_of_the_state_alone(dtype: torch.dtype, size: int) -> None:
    """But for parameters that begin at multiples of 64 bytes; and none is pinned later."""
    run = Run(dtype=dtype, **AUTO)
    arenas = {pair.arena for pair in run.optimizer._stepper.replica.pairs}
    params = [*run.net.parameters()]
    pinned = [memory.data_ptr() for arena in arenas for memory in arena.memory.values()]
    taken = sum(memory.nbytes for arena in arenas for memory in arena.memory.values())
    assert 0 <= taken - size * sum(p.numel() for p in params) <= 64 * len(params) * size // 4
    for step in range(3):
        run.step(step)
    after = {pair.arena for pair in run.optimizer._stepper.replica.pairs}
    assert pinned == [memory.data_ptr() for arena in after for memory in arena.memory.values()]


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize(
    ("weights", "dtype"), [("float32", torch.float32), ("16-bit", torch.bfloat16)]
)
def test_memory_is_what_the_self_test_says(
    monkeypatch: pytest.MonkeyPatch, weights: str, dtype: torch.dtype
) -> None:
    """But for what is small: counts of steps, samples of 16-bit parameters that tell edits, and the
    float32 gradients of some parameters."""
    monkeypatch.setattr(offloaded, "SMALLEST_BLOCK", WIDE * WIDE)
    small = 9 * WIDE * WIDE if weights == "16-bit" else 0
    expected = sizes.memory(WIDE * WIDE * LAYERS, weights)
    for settings, has in (
        ({"offload": "cpu", "offload_budget": 0}, expected.offload),
        ({"master_weights": "fp32"}, expected.copied),
        (None, expected.stock),
    ):
        gc.collect()
        synchronize()
        before = torch.accelerator.memory_allocated(DEVICE)
        layers = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)]
        net = nn.Sequential(*layers).to(DEVICE, dtype)
        inner: Any = torch.optim.AdamW(net.parameters(), fused=True)
        optimizer = inner if settings is None else AsyncOptimizer(inner, net, **settings)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        synchronize()
        rest = torch.accelerator.memory_allocated(DEVICE) - before
        assert has <= rest <= 1.02 * has + small
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        optimizer.step()
        synchronize()
        more = torch.accelerator.max_memory_allocated(DEVICE) - before - rest
        if settings is not None and "offload" in settings:
            assert expected.slots <= more <= 1.02 * expected.slots + small
        if settings is not None:
            optimizer.close()
        del net, layers, inner, optimizer, p


def test_streams_are_made_once() -> None:
    rings = [Run(**AUTO).optimizer._stepper.replica.ring for _ in range(2)]
    assert (rings[0].up, rings[0].down) == (rings[1].up, rings[1].down)


def test_nothing_is_left_after_closing() -> None:
    run = Run(**AUTO)
    for step in range(3):
        run.step(step)
    run.optimizer.close()
    assert type(run.inner.state).__name__ == "defaultdict"
    for p in run.net.parameters():
        assert not p._post_accumulate_grad_hooks
        assert run.inner.state[p]["exp_avg"].device == p.device
    assert not any(m._forward_pre_hooks for m in run.net.modules())


def test_a_model_and_an_optimizer_are_copied_and_pickled() -> None:
    run = Run(**AUTO)
    for step in range(3):
        run.step(step)
    other = copy.deepcopy(run.net)
    assert equal([*other.parameters()], [*run.net.parameters()])
    other(words(0)).sum().backward()
    inner = copy.deepcopy(run.inner)
    p = run.net.head.weight
    (index,) = [n for n, each in enumerate(run.net.parameters()) if each is p]
    assert equal(inner.state_dict()["state"][index]["exp_avg"], run.inner.state[p]["exp_avg"])
    run.step(3)


# Refusals: one line each, before anything is changed.


@pytest.mark.parametrize(
    ("make", "settings", "text"),
    [
        (lambda p: torch.optim.AdamW(p, capturable=True), {}, "capturable=True, expected False"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), {}, "differentiable=True"),
        (lambda p: torch.optim.Adafactor(p), {}, "Adafactor, expected a class of torch"),
        (lambda p: torch.optim.SparseAdam(list(p)), {}, "SparseAdam, expected a class of torch"),
        (fused_adamw, {"offload_budget": 2**50}, "offload_budget is 1048576.00 GiB, expected less"),
    ],
)
def test_what_cannot_stream_is_refused(make: Any, settings: dict[str, Any], text: str) -> None:
    net = nn.Linear(4, 4).to(DEVICE)
    inner = make(net.parameters())
    with pytest.raises(UnsupportedError, match=text):
        AsyncOptimizer(inner, net, step_mode="sync", offload="cpu", **settings)
    assert not inner.state


def test_submit_is_refused_with_offload() -> None:
    run = Run(**AUTO)
    run.backward(0)
    with pytest.raises(UnsupportedError, match="pass through the device inside"):
        run.optimizer.submit(run.inner.step)
    run.finish()


# Under Accelerate.


@pytest.mark.usefixtures("memory_counter")
def test_accelerate_says_which_backward_is_the_last(log: list[str]) -> None:
    from accelerate import Accelerator

    accelerator = attach(Accelerator(gradient_accumulation_steps=3), offload="cpu")
    net = Net().to(DEVICE)
    net, optimizer = accelerator.prepare(net, fused_adamw(net.parameters()))
    arenas = {pair.arena for pair in optimizer._stepper.replica.pairs}
    assert all({"exp_avg", "exp_avg_sq"} == set(arena.memory) for arena in arenas), "pinned"
    early = []
    for micro in range(12):
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(words(micro)).flatten(0, 1), words(micro).flatten())
            log.clear()
            accelerator.backward(loss)
            early.append(bool(log))
            optimizer.step()
            optimizer.zero_grad()
    detach(accelerator)
    assert not any(early[:3])
    assert early[9:] == [False, False, True]
