"""What the side streams wait for, shown on a device that exists only on paper (streams.py).

Each run also equals a plain loop, bit for bit.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from references import recording
from streams import Event, PaperDevice, Stream
from support import mlp, weights
from telemetry_runs import windows_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_scaler import AsyncOptimizer, GradScaler, UnsupportedError, devices
from accel_scaler.async_optimizer import async_stepper as async_stepper_module
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.preview import Previews
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.streams import SideStreams, packs
from accel_scaler.async_optimizer.worker import Task, Worker
from accel_scaler.errors import StepError
from accel_scaler.optimizer_step.boundary import Boundary
from accel_scaler.optimizer_step.stepper import async_stepper_of

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
    telemetry: Path | None = None,
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
    recorded = nullcontext() if telemetry is None else recording(scaler, telemetry)
    with (
        recorded,
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
        inflight, limit = ours._stepper._inflight, time.monotonic() + 10
        task = None if inflight is None else inflight.task
        while step % 2 and task is not None and not task.finished and time.monotonic() < limit:
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


@pytest.mark.parametrize("half", [False, True])
def test_what_is_measured_of_previews_races_with_nothing(
    paper: Any, half: bool, tmp_path: Path
) -> None:
    on_cpu, on_paper = tmp_path / "cpu.jsonl", tmp_path / "paper.jsonl"
    settings: Any = {"optimizer": "adamw", "compensation": "preview"}
    expected = train(None, "delayed", False, half, telemetry=on_cpu, **settings)
    got = train(paper(False), "delayed", False, half, telemetry=on_paper, **settings)
    assert torch.equal(got, expected)
    errors = [[line.get("preview_error") for line in windows_of(p)] for p in (on_cpu, on_paper)]
    late = [[e for e in of if e is not None] for of in errors]
    assert late[0] == pytest.approx(late[1], rel=1e-5)  # the parts differ
    for of in errors:
        assert [n for n, e in enumerate(of) if e is None] == [0, 3]


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


def test_a_part_that_was_waited_for_tells_nothing_of_the_next(paper: Any) -> None:
    """All is enqueued by then, but the host has seen the device do the first part alone."""
    device = paper(False)
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with AsyncOptimizer(inner, model) as optimizer, device.watch():
        for _ in range(3):  # the first shows the order of use
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            inflight = optimizer._stepper._inflight
            assert inflight is not None
            inflight.task.wait()
        assert isinstance(next(model.parameters()), Tensor)
        for p in model.parameters():
            p.detach().clone()


def test_memory_of_sparse_gradients_is_kept_too(paper: Any) -> None:
    device = paper(False)
    model = nn.Linear(2, 2)
    with AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
        streams = optimizer._stepper.streams
        device.recorded.clear()
        sparse = torch.eye(3).to_sparse()
        elsewhere = torch.ones(3, device="meta")
        streams.keep([None, sparse, elsewhere, torch.ones(2)])
    assert [name for *_, name in device.recorded] == ["side 1"] * 3


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_one_rank_of_fsdp2_sends_its_gradients_to_the_host(paper: Any, mode: str) -> None:
    """They are DTensors, the host's buffers are not. In the end torch goes on with its state."""

    def run(offload: str) -> Tensor:
        model: Any = mlp()
        mesh = init_device_mesh("cpu", (1,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        scaler = GradScaler("cpu", init_scale=1024.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with AsyncOptimizer(inner, model, scaler=scaler, mode=mode, offload=offload) as optimizer:
            for step in range(STEPS):
                scaler.scale(model(torch.full((2, 8), 0.1 * step)).square().mean()).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        inner.step()
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = run("none")
        assert torch.equal(run("cpu"), expected)
        paper(True)
        assert torch.equal(run("cpu"), expected)
        assert not torch.equal(expected, weights(mlp()))
    finally:
        dist.destroy_process_group()


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


@pytest.mark.parametrize(
    ("mode", "offload"), [("overlap", "none"), ("delayed", "none"), ("sync", "cpu")]
)
def test_parameters_on_several_devices_are_refused(mode: str, offload: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"parameters are on cpu, meta; expected"):
        AsyncOptimizer(inner, model, mode=mode, offload=offload)
    assert not vars(inner).keys() & {"_opt_called"}
    assert async_stepper_of(inner) is None


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


def test_what_is_on_its_way_up_is_not_overwritten(
    paper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody uses a parameter between a step that is not late and a preview in its buffer."""
    device, calls = paper(True), list[str]()
    wait, make = SideStreams.wait_for_side, Previews._make

    def waiting(self: SideStreams) -> None:
        calls.append("wait")
        wait(self)

    def making(self: Previews, *args: Any) -> None:
        calls.append("make")
        make(self, *args)

    monkeypatch.setattr(SideStreams, "wait_for_side", waiting)
    monkeypatch.setattr(Previews, "_make", making)
    model = mlp().half()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    settings: Any = {"mode": "delayed", "offload": "cpu"}
    with device.watch(), AsyncOptimizer(inner, **settings) as optimizer:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones(p.shape, dtype=p.dtype)  # asks for no element
            optimizer.step()
        optimizer.synchronize()
    assert calls == ["wait", "make"] * len(list(model.parameters()))


def test_a_boundary_is_refused_in_a_graph_that_is_being_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    boundary = Boundary(scaler, torch.device("meta"))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boundary.add(optimizer)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match="a graph is being captured"):
            boundary.step(optimizer)
    assert scaler.get_scale() == 1024.0
    assert boundary.step(optimizer)
    assert scaler.get_scale() == 2048.0


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


def test_pinned_memory_is_in_several_buffers(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paper(True)
    made: list[int] = []
    empty = torch.empty

    def counted(*size: Any, **kwargs: Any) -> Tensor:
        assert str(kwargs["device"]) == "cpu"
        assert kwargs["pin_memory"]
        made.append(size[0])
        return empty(*size, **kwargs)

    model = nn.Sequential(*[nn.Linear(31, 33, bias=False) for _ in range(9)])
    optimizer = AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with optimizer:
        streams = optimizer._stepper.streams
        monkeypatch.setattr(torch, "empty", counted)
        views = streams.host_like([p.detach() for p in model.parameters()])
    assert made == [8 * 1023, 1023]
    assert [v.shape for v in views] == [p.shape for p in model.parameters()]
    for number, view in enumerate(views):
        view.fill_(number)
    assert all(bool((view == number).all()) for number, view in enumerate(views))
