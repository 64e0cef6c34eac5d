"""What the side streams wait for, shown on a device that exists only on paper (streams.py).

Each run also equals a plain loop, bit for bit.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import Event, PaperDevice, Stream
from support import mlp, weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, UnsupportedError, devices
from accel_scaler.async_optimizer import async_stepper as async_stepper_module
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.streams import SideStreams, packs
from accel_scaler.async_optimizer.worker import Task, Worker
from accel_scaler.errors import StepError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], PaperDevice]:
    """Puts a paper device under every SideStreams made from here on."""

    def put(offload: bool) -> PaperDevice:
        device = PaperDevice(host_worker=offload)

        class PaperStreams(SideStreams):
            def __init__(self, _: torch.device) -> None:
                self.device, self._backend = torch.device("cpu"), device
                self.home: Any = None
                self._last: Any = None
                self._known: Any = None
                self._followed: Any = None
                self._work, self._down = device.new(), device.new()

        empty = torch.empty

        def pinned(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = empty(*size, **kwargs)
            if pin_memory:
                device.make_host(made)
            return made

        def on_host(due: Any) -> Any:
            number = due.multiply if due.divide is None else due.divide
            if number is not None:
                float(number)  # waits, as .cpu() would
                copied = torch.tensor(number.tolist())
                device.make_host(copied)
                name = "multiply" if due.divide is None else "divide"
                return type(due)(**{name: copied})
            return due

        monkeypatch.setattr(async_stepper_module, "SideStreams", PaperStreams)
        monkeypatch.setattr(async_stepper_module, "on_host", on_host)
        monkeypatch.setattr(torch, "empty", pinned)
        monkeypatch.setattr(Tensor, "record_stream", lambda t, s: device.record_stream(t, s))
        _order_threads(monkeypatch, device)
        monkeypatch.setattr(replica_module, "SMALLEST_PART", 1)  # a part for each parameter
        return device

    return put


def _order_threads(monkeypatch: pytest.MonkeyPatch, device: PaperDevice) -> None:
    """What a task's hand-over and its parts say from one thread of the host to another."""
    known: dict[int, list[dict[str, int]]] = {}
    submit, execute, advance, wait = Worker.submit, Task.execute, Task.advance, Task.wait

    def put_in(task: Task) -> None:
        known.setdefault(id(task), []).append(dict(device.host_clock()))

    def take_out(task: Task) -> None:
        for clock in list(known.get(id(task), [])):
            mine = device.host_clock()
            for agent, at in clock.items():
                mine[agent] = max(mine.get(agent, 0), at)

    def submit_(worker: Worker, task: Task) -> None:
        put_in(task)
        submit(worker, task)

    def execute_(task: Task) -> None:
        take_out(task)
        execute(task)
        put_in(task)

    def advance_(task: Task) -> None:
        put_in(task)
        advance(task)

    def wait_(task: Task, *args: Any, **kwargs: Any) -> bool:
        result = wait(task, *args, **kwargs)
        take_out(task)
        return result

    monkeypatch.setattr(Worker, "submit", submit_)
    monkeypatch.setattr(Task, "execute", execute_)
    monkeypatch.setattr(Task, "advance", advance_)
    monkeypatch.setattr(Task, "wait", wait_)


def train(
    device: PaperDevice | None,
    mode: str,
    offload: bool,
    half: bool,
    optimizer: str = "sgd",
    fence: int | None = None,
    overflow: int | None = 3,
    compensation: str = "auto",
) -> Tensor:
    """A few steps; with ``fence``, everything is published between that backward and its step."""
    model = mlp()
    if half:
        model.half()
    inner: Any = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    }[optimizer]()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with (
        AsyncOptimizer(
            inner,
            model,
            scaler=scaler,
            mode=mode,
            offload="cpu" if offload else "none",
            delay_compensation=compensation,
        ) as ours,
    ):
        if device is None:
            _steps(ours, model, scaler, half, fence, overflow)
        else:
            with device.watch():
                _steps(ours, model, scaler, half, fence, overflow)
        ours.synchronize()
    return weights(model)


def _steps(
    ours: AsyncOptimizer,
    model: nn.Module,
    scaler: GradScaler,
    half: bool,
    fence: int | None,
    overflow: int | None,
) -> None:
    seeded = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        x, y = torch.randn(4, 8, generator=seeded), torch.randn(4, 1, generator=seeded)
        if half:
            x, y = x.half(), y.half()
        loss = nn.functional.mse_loss(model(x), y).float()
        scaler.scale(loss * float("inf") if step == overflow else loss).backward()
        if step == fence:
            ours.synchronize()
        ours.clip_grad_norm_(0.5)
        ours.step()
        ours.zero_grad()
        timing, limit = ours.timing, time.monotonic() + 10
        while step % 2 and timing and not timing.finished and time.monotonic() < limit:
            time.sleep(0.001)  # the thread that enqueues is far ahead of the forward
        _litter(model)


def _litter(model: nn.Module) -> None:
    """Take and give back memory of the gradients' sizes, as a forward would."""
    kept = [torch.zeros(p.shape, dtype=p.dtype) for p in model.parameters() for _ in range(4)]
    del kept


CASES = [
    ("sync", False, True),
    ("sync", True, False),
    ("sync", True, True),
    ("overlap", False, False),
    ("overlap", False, True),
    ("overlap", True, False),
    ("overlap", True, True),
    ("delayed", False, False),
    ("delayed", False, True),
    ("delayed", True, False),
    ("delayed", True, True),
]


@pytest.mark.parametrize(("optimizer", "fence"), [("sgd", 4), ("adamw", None)])
@pytest.mark.parametrize(("mode", "offload", "half"), CASES)
def test_no_two_accesses_race(
    paper: Any, mode: str, offload: bool, half: bool, optimizer: str, fence: int | None
) -> None:
    expected = train(None, mode, offload, half, optimizer, fence)
    device = paper(offload)
    assert torch.equal(train(device, mode, offload, half, optimizer, fence), expected)
    used = set(device.operations)
    assert "home" in used
    # The update, or with offload the way up; then also the way down. Else ``sync`` needs neither.
    sides = {"side 1", "side 2"} if offload else {"side 1"} if mode != "sync" else set()
    assert {"side 1", "side 2"} & used == sides
    if offload:
        assert any(name.startswith("host") for name in used)


@pytest.mark.parametrize("offload", [False, True])
def test_a_fence_on_another_stream_leaves_the_training_stream_in_order(
    paper: Any, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    device = paper(offload)
    synchronize = AsyncOptimizer.synchronize
    zero_grad = AsyncOptimizer.zero_grad

    def fence_elsewhere(self: AsyncOptimizer, *args: Any) -> None:
        with device.on(Stream(device, "evaluation")):
            synchronize(self)
        zero_grad(self, *args)

    expected = train(None, "overlap", offload, False)
    monkeypatch.setattr(AsyncOptimizer, "zero_grad", fence_elsewhere)
    assert torch.equal(train(device, "overlap", offload, False), expected)


@pytest.mark.parametrize("told", ["synchronize", "a use"])
@pytest.mark.parametrize("failing", [1, 2])
def test_after_a_failure_the_forward_waits_for_what_had_begun(
    paper: Any, monkeypatch: pytest.MonkeyPatch, failing: int, told: str
) -> None:
    device = paper(False)
    step_part, calls = Replica.step_part, []

    def half_way(self: Replica, *args: Any) -> None:
        step_part(self, *args)
        calls.append(None)
        if len(calls) == failing:
            raise ArithmeticError("half-way")

    monkeypatch.setattr(Replica, "step_part", half_way)
    model = mlp()
    optimizer = AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with device.watch():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with pytest.raises(StepError, match="half-way"):  # noqa: PT012
            if told == "a use":
                list(model.parameters())[failing - 1].sum()
            optimizer.synchronize()
        for p in model.parameters():
            p.detach().clone()
    optimizer.close()


def test_a_backend_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object) -> Any:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", none)
    with pytest.raises(UnsupportedError, match=r"on xla:0, .*\(torch.Stream: Backend doesn't"):
        SideStreams(torch.device("xla:0"))
    assert devices.streams_of(torch.device("cpu")) is None


def test_streams_of_another_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(9))
    monkeypatch.setattr(torch, "Stream", lambda device: (device, next(made)))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(UnsupportedError, match=r"on cuda:0, .*torch.accelerator is xpu"):
        SideStreams(torch.device("cuda:0"))


def test_one_queue_keeps_the_order_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Apple's MPS, where torch makes the same stream again and again."""
    monkeypatch.setattr(torch, "Stream", lambda device: (device, 0))
    streams = SideStreams(torch.device("mps:0"))
    assert not streams.copies_beside
    assert not streams.is_host  # so that what is for host memory alone is not used there
    assert streams.record() is None
    (held,) = streams.host_like([torch.ones(3)])
    assert streams.down(torch.ones(3), held) is None
    assert held.tolist() == [1.0, 1.0, 1.0]


def test_a_parameter_on_another_device_is_refused_when_it_comes() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AsyncOptimizer(inner, model)
    model(torch.ones(2)).sum().backward()
    before = weights(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    with pytest.raises(UnsupportedError, match="parameters are on cpu, meta; expected"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert all(p.grad is not None for p in model.parameters())
    del inner.param_groups[1]
    optimizer.step()
    optimizer.close()
    assert not torch.equal(weights(model), before)


def test_a_graph_that_is_being_captured_refuses_a_step(
    paper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper(False)
    model = mlp()
    with AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        before = weights(model)
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_capturing", lambda: True)
            with pytest.raises(UnsupportedError, match=r"optimizer.step\(\): a graph is being"):
                optimizer.step()
            with pytest.raises(UnsupportedError, match=r"submit\(\): a graph is being"):
                optimizer.submit(optimizer.step)
        assert all(map(operator.is_, grads, [p.grad for p in model.parameters()]))
        assert torch.equal(weights(model), before)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_capturing", lambda: True)
            with pytest.raises(UnsupportedError, match=r"synchronize\(\) before the capture"):
                model(torch.ones(2, 8))
        optimizer.synchronize()
        assert not torch.equal(weights(model), before)


def test_a_graph_is_captured_behind_a_fence_as_the_model_is(
    paper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next training forward that runs is shown the preview again."""
    device = paper(False)
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with device.watch(), AsyncOptimizer(inner, model, mode="delayed") as optimizer:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        exact = weights(model)
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_capturing", lambda: True)
            patch.setattr(async_stepper_module, "is_capturing", lambda: True)
            patch.setattr(device, "synchronize", lambda: pytest.fail("waits for the device"))
            patch.setattr(Event, "synchronize", lambda _: pytest.fail("waits for the device"))
            model(torch.ones(2, 8)).sum()
        assert torch.equal(weights(model), exact)
        model(torch.ones(2, 8)).sum()
        assert not torch.equal(weights(model), exact)


@given(st.lists(st.integers(0, 1 << 20), max_size=40))
def test_few_buffers_hold_what_is_pinned_without_much_rounding(lengths: list[int]) -> None:
    """torch rounds each up to a power of two; one for all could be twice as large as needed."""
    found = packs(lengths)
    assert sorted(i for pack in found for i in pack) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in pack) for pack in found]
    sizes = [1 << (n - 1).bit_length() for n in sums if n]
    some = sorted(filter(None, lengths))
    if some:
        assert len(found) <= 2 + (sum(some) // some[0]).bit_length()
        assert sum(sizes) - sum(lengths) < some[-1] + sum(
            min(lengths[i] for i in pack) for pack in found
        )
