"""Reads that torch does not dispatch, compiled and scripted code, copies: each sees the update.

The worker is ``lazy``: it updates a part when somebody waits for it, so that a read which does not
wait surely gets the value before the step.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.parallel.replicate
from accelerate import Accelerator
from async_support import lazy, values
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from versions import release

from accel_scaler import AsyncOptimizer, ScalerConfig, StepError, UnsupportedError, attach, detach
from accel_scaler.async_optimizer.pending_parameter import PASSIVE, ParameterHold, PendingParameter

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]

replicate_module: Any = sys.modules["torch.nn.parallel.replicate"]
"""``torch.nn.parallel.replicate`` is the function in it."""

LR = 0.5
LIMIT_S = 60.0
BEFORE, AFTER = 1.0, 3.0


class Due:
    """A parameter that another thread updates when it is waited for, as the worker does."""

    def __init__(self) -> None:
        self.p = nn.Parameter(torch.full((2, 3), BEFORE))
        self.memory, self.waits = self.p.detach(), 0
        self.hold = ParameterHold([self.p], [1], {id(self.p): 1}, self.wait)

    def wait(self, parts: int) -> int:
        self.waits += 1
        thread = threading.Thread(target=self.memory.fill_, args=(AFTER,))
        thread.start()
        thread.join(LIMIT_S)
        return parts


class Scaled(nn.Module):
    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.w = p

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def scripted_function(p: Tensor) -> Any:
    return torch.jit.script(nn.functional.softsign)(p)


def through_functional_call(p: Tensor) -> Tensor:
    inner = nn.Linear(3, 2, bias=False)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(inner, params, (torch.ones(1, 3),)).square().sum()

    return torch.func.grad(loss)({"weight": p})["weight"]


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


READS: dict[str, Callable[[Any], Any]] = {
    "torch.tensor": lambda p: torch.tensor(p),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p),
    "FloatTensor": lambda p: torch.FloatTensor(p),
    "as_tensor": lambda p: torch.as_tensor(p),
    "asarray": lambda p: torch.asarray(p),
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "set_ of its own": lambda p: p.requires_grad_(False).set_(torch.ones(2)),
    "set_": lambda p: torch.zeros(1).set_(p.requires_grad_(False)),
    "to_dlpack": lambda p: torch.from_dlpack(torch.to_dlpack(p.requires_grad_(False))),
    "nn.Parameter": lambda p: nn.Parameter(p.data),
    "nn.Buffer": lambda p: nn.Buffer(p.requires_grad_(False)),
    "a scripted function": scripted_function,
    "a traced function": lambda p: torch.jit.trace(lambda x: x * 2, torch.ones(2, 3))(p),
    "scripting a module": lambda p: torch.jit.script(Scaled(p))(torch.ones(2, 3)),
    "grad": lambda p: torch.func.grad(square)(p),
    "grad of a tree": lambda p: torch.func.grad(lambda d: square(d["a"][0]))({"a": [p]})["a"][0],
    "grad around it": lambda p: torch.func.grad(lambda x: (x * p * p).sum())(torch.ones(2, 3)),
    "vjp": lambda p: torch.func.vjp(torch.sin, p)[0],
    "jacfwd": lambda p: torch.func.jacfwd(lambda x: (x * x).sum(0))(p),
    "functionalize": lambda p: torch.func.functionalize(lambda x: x + 1)(p),
    "vmap": lambda p: torch.func.vmap(lambda x: x * 2)(p),
    "functional_call of a submodule": through_functional_call,
    "stack_module_state": lambda p: torch.func.stack_module_state([Scaled(p)])[0]["w"],
    "flatten_dense_tensors": lambda p: torch._C._nn.flatten_dense_tensors([p]),
    "isinstance": lambda p: (isinstance(p, Tensor), isinstance(p, nn.Parameter)),
    "its own __class__": lambda p: issubclass(p.__class__, nn.Parameter),
    "its __dict__": lambda p: p.__dict__,
}


def problem_with(read: Callable[[Any], Any]) -> str | None:
    due = Due()
    result = read(due.p)
    expected = read(nn.Parameter(torch.full((2, 3), AFTER)))
    if due.waits != 1 or type(due.p) is not nn.Parameter:
        return f"waited {due.waits} times"
    if isinstance(expected, Tensor):
        same = torch.equal(result, expected) and type(result) is type(expected)
        same = same and result.requires_grad == expected.requires_grad
    else:
        same = result == expected
    return None if same else f"got {result}, expected {expected}"


def test_reads_that_torch_does_not_dispatch_wait() -> None:
    problems = {name: problem_with(read) for name, read in READS.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


# Of the names of a tensor's C class: said in pending_parameter.py, or no method of an element.
NO_READ = {
    *("__class__", "__dir__", "__init__", "__new__", "__subclasshook__", "__init_subclass__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__getstate__", "__str__", "__repr__"),
    *("__sizeof__", "__hash__", "__format__", "__eq__", "__ne__", "__reduce__", "__doc__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__reduce_ex__", "_fix_weakref", "_use_count"),
}


def works(name: str) -> bool:
    """Whether it can be called without arguments, on a matrix."""
    p = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    try:
        return getattr(p, name)() is not NotImplemented
    except Exception:
        return False


def test_no_method_of_a_tensor_gets_by() -> None:
    """It waits, or is known to read no element."""
    passive = {getattr(f, "__name__", "") for f in PASSIVE}
    unseen, called = [], 0
    for name in sorted(set(dir(torch._C.TensorBase)) - NO_READ - passive):
        if callable(getattr(torch._C.TensorBase, name)) and works(name):
            due = Due()
            with contextlib.suppress(RuntimeError):  # of a value: no probability
                getattr(due.p.requires_grad_(False), name)()
            called += 1
            if due.waits == 0:
                due.hold.release()
                unseen.append(name)
    assert unseen == []
    assert called > 100


def test_a_failed_wait_is_raised_where_torch_asks_for_the_class() -> None:
    def fail(parts: int) -> int:
        raise StepError("lost")

    for read in (READS["torch.tensor"], READS["isinstance"], scripted_function, READS["grad"]):
        p = nn.Parameter(torch.ones(2, 3))
        hold = ParameterHold([p], [1], {id(p): 1}, fail)
        with pytest.raises(StepError, match="lost"):
            read(p)
        assert type(p) is nn.Parameter
        hold.release()


class Layer(nn.Linear):
    """Not torch's own, which a compiler would skip if it is compiled alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Own(nn.Module):
    """Layers, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(3, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.gain)


def network() -> Own:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Own()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)


def train(call: Callable[[Tensor], Tensor], optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = call(torch.linspace(-1.0, 1.0, 6).reshape(2, 3) + step).square().sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


STEPS = range(5)


def reference(compiled: str | None, mode: str) -> list[float]:
    """Plain torch; in ``delayed`` ours, not compiled."""
    model = network()
    if mode == "delayed":
        with AsyncOptimizer(sgd(model), model, mode=mode) as optimizer:
            return train(model, optimizer, STEPS)
    return train(model, sgd(model), STEPS)


def in_place(model: Own, backend: Any) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def wrapped(model: Own, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def forward(model: Own, backend: Any) -> Any:
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)  # type: ignore
    return model


def inner_layer(model: Own, backend: Any) -> Any:
    model.a.compile(backend=backend, fullgraph=True)
    return model


def function(model: Own, backend: Any) -> Any:
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


def function_of_a_part(model: Own, backend: Any) -> Any:
    part = torch.compile(lambda x: model.a(x), backend=backend, fullgraph=True)
    return lambda x: model.b(torch.tanh(part(x)) * model.gain)


def function_around_a_compiled_layer(model: Own, backend: Any) -> Any:
    return function(inner_layer(model, backend), backend)


COMPILED = [
    *(in_place, wrapped, forward, inner_layer, function, function_of_a_part),
    function_around_a_compiled_layer,
]
SEEN_BEFORE = (in_place, wrapped, forward, inner_layer)
"""Known to be compiled before they run, so that no guard ever sees the pending class."""


@pytest.mark.parametrize(("after", "mode"), [(False, "delayed"), (True, "overlap")])
@pytest.mark.parametrize("how", COMPILED)
def test_compiled_code_sees_the_update_in_one_graph(
    how: Callable[..., Any], after: bool, mode: str
) -> None:
    torch._dynamo.reset()
    counter, model = CompileCounter(), network()
    inner = sgd(model)
    with lazy():
        if after:
            optimizer = AsyncOptimizer(inner, model, mode=mode)
            call = how(model, counter)
        else:
            call = how(model, counter)
            given = call if how is wrapped else model
            optimizer = AsyncOptimizer(inner, given, mode=mode)
        with optimizer:
            losses = train(call, optimizer, STEPS)
    known = how in SEEN_BEFORE and not (after and how is wrapped)
    if release("torch") < (2, 13) and not known:  # versions.UNGUARDED: a call reads the newest
        known, mode = True, "overlap"
    assert losses == reference(None, mode)
    assert counter.frame_count == (1 if known else 2)


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_wait_once_each_before_a_compiled_call_and_leave_it(first: int) -> None:
    model = network()
    model.compile(backend="eager")
    compiled, halves = model._compiled_call_impl, (model.a, model.b)
    each = [AsyncOptimizer(sgd(half), model) for half in halves]
    lengths = []
    for step in range(4):
        model(torch.full((2, 3), float(step))).sum().backward()
        for optimizer in each:
            optimizer.step()
        calls: list[Any] = [model]
        while (inner := getattr(calls[-1], "_compiled_call_impl", None)) is not None:
            calls.append(inner)
        lengths.append(len(calls))
    assert lengths == [4] * 4  # the model, one call of each, the compiled one
    each[first].close()
    each[1 - first].close()
    assert model._compiled_call_impl is compiled


def test_a_compiled_function_of_something_else_costs_no_overlap() -> None:
    torch._dynamo.reset()
    model, seen = network(), []
    loss = torch.compile(lambda y: y.square(), backend="eager", fullgraph=True)
    with lazy(), AsyncOptimizer(sgd(model), model) as optimizer:
        for step in range(3):
            x = torch.linspace(-1.0, 1.0, 6).reshape(2, 3) + step
            loss(model(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append({type(p) for p in model.parameters()})
    assert seen == [{PendingParameter}] * 3


class WithScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first, self.inside = nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(self.first(x))
        return result


def test_a_scripted_module_inside_a_model_trains_as_in_torch() -> None:
    model, plain = WithScript(), WithScript()
    expected = train(plain, sgd(plain), STEPS)
    with lazy(), AsyncOptimizer(sgd(model), model) as optimizer:
        assert train(model, optimizer, STEPS) == expected
        x = torch.ones(1, 4)
        assert torch.equal(model.inside(x), plain.inside(x))  # alone, through no hook
        assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


def hooks_of(model: nn.Module) -> int:
    names = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
    names = (*names, "_load_state_dict_pre_hooks")
    return sum(len(getattr(m, name)) for m in model.modules() for name in names)


def test_delayed_refuses_a_scripted_module_and_leaves_nothing_behind() -> None:
    model = WithScript()
    inner = sgd(model)
    with pytest.raises(UnsupportedError, match="'inside' is a ScriptModule"):
        AsyncOptimizer(inner, model, mode="delayed")
    assert hooks_of(model.first) == 0
    assert not [key for key in vars(inner) if "accel_scaler" in key]
    AsyncOptimizer(inner, model, mode="overlap").close()


# In `delayed`, what reads outside the training step sees the newest parameters.


def delayed(model: nn.Module, **options: Any) -> AsyncOptimizer:
    return AsyncOptimizer(sgd(model), model, mode="delayed", **options)


def newest() -> list[Tensor]:
    model = network()
    with delayed(model) as optimizer:
        train(model, optimizer, range(3))
    return values(model)


class Wrapper(nn.Module):
    """As peft's: what it generates with is the model inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(x)
        return result

    def generate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.inside(x)
            return result


def without_grad(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.inside(x)


def in_eval(model: Any, x: Tensor) -> None:
    model.inside.eval()(x)


EVALUATIONS: dict[str, Callable[[Any, Tensor], object]] = {
    "generate": lambda model, x: model.generate(x),
    "an inner module": without_grad,
    "an inner module in eval mode": in_eval,
    "its layer": lambda model, x: model.inside.a.eval()(x),
    "its state_dict": lambda model, _: model.inside.a.state_dict(),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_delayed_shows_an_inner_evaluation_the_newest(name: str) -> None:
    model, expected = Wrapper(network()), newest()
    with lazy(), delayed(model) as optimizer:
        train(model, optimizer, range(3))
        assert not same(values(model), expected)
        EVALUATIONS[name](model, torch.ones(1, 3))
        assert same(values(model), expected)


def test_delayed_publishes_nothing_for_a_frozen_layer_in_a_training_forward() -> None:
    def run(frozen: Callable[[Own], object], call: Callable[..., Any]) -> list[float]:
        model = network()
        frozen(model)
        with lazy(), delayed(model) as optimizer:
            return train(lambda x: call(model, x), optimizer, STEPS)

    def by_checkpoint(model: Own, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return result

    expected = run(lambda model: None, lambda model, x: model(x))
    assert run(lambda model: model.b.eval(), lambda model, x: model(x)) == expected
    assert run(lambda model: model.b.eval(), by_checkpoint) == expected


# Views, versions, inference mode.


@pytest.mark.parametrize(
    ("mode", "offload"),
    [("sync", "none"), ("overlap", "none"), ("overlap", "cpu"), ("delayed", "none")],
)
def test_a_parameter_without_gradient_may_still_be_needed_by_a_backward(
    mode: str, offload: str
) -> None:
    results = []
    for ours in (False, True):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer: Any = AsyncOptimizer(inner, mode=mode, offload=offload) if ours else inner
        for _ in range(2):
            later = model.b(torch.ones(1, 4, requires_grad=True)).square().sum()
            model.a(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()  # b has no gradient
            optimizer.zero_grad()
            if ours and mode == "delayed":
                optimizer.synchronize()
            later.backward()
            optimizer.step()
            optimizer.zero_grad()
            if ours and mode == "delayed":
                optimizer.synchronize()
        if ours:
            optimizer.close()
        results.append(values(model))
    assert same(*results)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_a_backward_through_what_a_step_has_changed_is_refused_as_in_torch(mode: str) -> None:
    model = network()
    with AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=LR), mode=mode) as optimizer:
        x = torch.ones(1, 4, requires_grad=True)
        for p in model.b.parameters():
            p.grad = torch.ones_like(p)
        later = model.b(x).square().sum()
        optimizer.step()
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()


@pytest.mark.parametrize(("mode", "offload"), [("overlap", "cpu"), ("delayed", "none")])
def test_masters_made_inside_inference_mode_train(mode: str, offload: str) -> None:
    results = []
    for looks in (False, True):
        model = network().to(torch.float16)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        accelerator: Any = attach(
            Accelerator(cpu=True, mixed_precision="fp16"),
            ScalerConfig(step_mode=mode, offload=offload, init_scale=4.0),  # type: ignore[arg-type]
        )
        prepared, optimizer = accelerator.prepare(model, inner)
        if looks:
            with torch.inference_mode():
                optimizer.state_dict()
                prepared(torch.ones(1, 3))
        for step in range(3):
            accelerator.backward(prepared(torch.ones(1, 3) + step).float().square().sum())
            optimizer.step()
            optimizer.zero_grad()
            if looks and step == 1:
                with torch.inference_mode():
                    optimizer.state_dict()
            elif step == 1:
                optimizer.synchronize()
        detach(accelerator)
        results.append(values(model))
    assert same(*results)


# Replicas


class _Copied(torch.autograd.Function):
    """What ``Broadcast`` does, which refuses CPU tensors: C++ that reads each of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return grads


class Replicated(nn.DataParallel):
    """Two replicas, on two threads, as where there are two devices."""

    def forward(self, x: Tensor) -> Tensor:
        replicas = replicate_module.replicate(self.module, [0, 1])
        results: dict[int, Any] = {}
        graded = torch.is_grad_enabled()

        def work(i: int, part: Tensor) -> None:
            try:
                with torch.set_grad_enabled(graded):
                    results[i] = replicas[i](part)
            except Exception as error:
                results[i] = error

        threads = [
            threading.Thread(target=work, args=(i, part)) for i, part in enumerate(x.chunk(2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return torch.cat([results[0], results[1]])


@pytest.fixture
def replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """``replicate`` copies on a CPU, too."""

    def copied(tensors: Any, devices: Any, detach: bool = False) -> Any:
        if detach or not tensors:
            return [[t.detach().clone() for t in tensors] for _ in devices]
        return [_Copied.apply(*tensors) for _ in devices]

    monkeypatch.setattr(replicate_module, "_get_device_index", lambda d, _: d)
    monkeypatch.setattr(replicate_module, "_broadcast_coalesced_reshape", copied)


@pytest.mark.usefixtures("replicated")
@pytest.mark.parametrize(("mode", "offload"), [("overlap", "none"), ("delayed", "cpu")])
@pytest.mark.parametrize("place", ["submodule", "root"])
def test_the_replicas_of_a_data_parallel_module_are_of_the_newest(
    mode: str, offload: str, place: str
) -> None:
    """Also where a layer in it is frozen, which is no evaluation; evaluated, it is the newest."""

    def run(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        inner[1].eval()
        model: Any = Replicated(inner)
        if place != "root":
            model = nn.Sequential(nn.Linear(3, 3), model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if ours:
            optimizer = AsyncOptimizer(
                optimizer, model, mode=mode, offload=offload, delay_warmup_steps=99
            )
        seen = []
        for step in range(4):
            out = model(torch.full((4, 3), float(step + 1)))
            seen.append(out.detach().clone())
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(model(torch.ones(4, 3)))
        if ours:
            optimizer.close()
        return seen

    expected = run(False)
    with lazy():
        seen = run(True)
    assert all(map(torch.equal, seen, expected))
