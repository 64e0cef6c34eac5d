"""Direct calls of torch's fused kernels, against ``optimizer.step()``, bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import same
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import StepLR

from accel_scaler.optimizer_step.stepper import InlineStepper
from accel_scaler.scaling import call_fused

SHAPES = [(3, 5), (7,), (), (80, 60), (4096,), (4097,)]


pytestmark = pytest.mark.usefixtures("one_thread")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def everything(optimizer: Optimizer) -> list[Tensor]:
    """Parameters and state, in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [
        value for p in params for _, value in sorted(optimizer.state[p].items(), key=lambda i: i[0])
    ]
    return [*(p.detach() for p in params), *state]


class Watched(InlineStepper):
    """Whether the last step was direct calls, not the optimizer's own step."""

    was_direct = False

    def _call_kernels(self, *args: Any) -> bool:
        self.was_direct = super()._call_kernels(*args)
        return self.was_direct


class Twins:
    """The same optimizer twice: one stepped by a stepper, one as torch steps it."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer], schedule: bool = False):
        self.params = [parameters(), parameters()]
        self.ours, self.torchs = (make(params) for params in self.params)
        both = (self.ours, self.torchs)
        self.schedules = [StepLR(optimizer, 3, gamma=0.5) for optimizer in both if schedule]
        self.stepper = Watched(self.ours)
        self.steps = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.steps += 1
            for params in self.params:
                give_gradients(params, self.steps)
            self.stepper.step()
            call_fused(self.torchs, None, None)
            for schedule in self.schedules:
                schedule.step()
        assert same(everything(self.ours), everything(self.torchs))


def adamw(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, fused=True)


def two_groups(params: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": params[:2], "lr": 0.1, "weight_decay": 0.0},
        {"params": params[2:], "betas": (0.8, 0.9), "eps": 1e-6},
    ]
    return AdamW(groups, lr=0.01, fused=True)


MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adam": lambda params: Adam(params, lr=0.01, fused=True),
    "adam with decay": lambda params: Adam(params, lr=0.01, weight_decay=0.1, fused=True),
    "adamw": adamw,
    "amsgrad": lambda params: AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "maximize": lambda params: Adam(params, lr=0.01, maximize=True, fused=True),
    "two groups": two_groups,
    "sgd": lambda params: SGD(params, lr=0.01, fused=True),
    "momentum": lambda params: SGD(
        params, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True
    ),
    "tensor lr": lambda params: AdamW(params, lr=torch.tensor(0.01), fused=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_equals_torch(make: Any) -> None:
    twins = Twins(make, schedule=True)
    twins.step(20)
    assert twins.stepper.was_direct
    assert [g["lr"] for g in twins.ours.param_groups] == [
        g["lr"] for g in twins.torchs.param_groups
    ]


def reload(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def new_tensor(key: str) -> Callable[[Optimizer], None]:
    def change(optimizer: Optimizer) -> None:
        entry = optimizer.state[optimizer.param_groups[0]["params"][0]]
        entry[key] = torch.full_like(entry[key], 2.0)

    return change


def reorder(optimizer: Optimizer) -> None:
    """Two of one stride, in a new list, with their state as it was."""
    group = optimizer.param_groups[0]
    *others, first, second = group["params"]
    group["params"] = [*others, second, first]


def swap_parameter(optimizer: Optimizer) -> None:
    """As Accelerate's ``_switch_parameters`` and point-cloud training do."""
    params = optimizer.param_groups[0]["params"]
    new = nn.Parameter(params[0].detach().clone() + 1)
    new.grad = torch.ones_like(new)
    optimizer.state[new] = optimizer.state.pop(params[0])
    params[0] = new


def assign_step(optimizer: Optimizer) -> None:
    step = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]
    step.data = step.data + 5


def assign_parameter(optimizer: Optimizer) -> None:
    """As code that sends a model to the CPU and back does."""
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data + 1


def amsgrad_off(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = False


CHANGES = {
    "load_state_dict": reload,
    "exp_avg replaced": new_tensor("exp_avg"),
    "max_exp_avg_sq replaced": new_tensor("max_exp_avg_sq"),
    "step replaced": new_tensor("step"),
    "data of step assigned": assign_step,
    "data of parameters assigned": assign_parameter,
    "parameter swapped": swap_parameter,
    "parameters reordered": reorder,
    "amsgrad off": amsgrad_off,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_in_the_middle_is_noticed(change: Callable[[Optimizer], None]) -> None:
    twins = Twins(MAKERS["amsgrad"])
    twins.step(3)
    assert twins.stepper.was_direct
    change(twins.ours)
    change(twins.torchs)
    twins.step(3)
    assert twins.stepper.was_direct


def count_with_hook(optimizer: Any, kind: str) -> tuple[list[int], Any]:
    calls: list[int] = []

    def hook(stepped: Optimizer, *args: Any) -> None:
        if stepped is optimizer:
            calls.append(1)

    if kind in ("pre", "post"):
        return calls, getattr(optimizer, f"register_step_{kind}_hook")(hook)
    if kind in ("global pre", "global post"):
        register = getattr(optimizer_module, f"register_optimizer_step_{kind[7:]}_hook")
        return calls, register(hook)
    else:
        # With __wrapped__ as an LR scheduler's wrapper has it.
        plain = optimizer.step
        target = type(optimizer).step if kind == "patched like a scheduler" else plain

        @functools.wraps(target)
        def step(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return plain(*args, **kwargs)

        optimizer.step = step
        return calls, None


@pytest.mark.parametrize(
    "kind", ["pre", "post", "global pre", "global post", "patched", "patched like a scheduler"]
)
def test_hooks_and_patches_are_called(kind: str) -> None:
    twins = Twins(adamw)
    twins.step(2)
    calls, handle = count_with_hook(twins.ours, kind)
    twins.step(3)
    assert len(calls) == 3
    if handle is None:
        assert not twins.stepper.was_direct
        return
    handle.remove()
    twins.step()
    assert twins.stepper.was_direct


class Own(AdamW):
    """A subclass may do anything in ``step``."""


def test_another_class_is_stepped_by_its_own_step() -> None:
    twins = Twins(lambda params: Own(params, lr=0.1, fused=True))
    twins.step(3)
    assert not twins.stepper.was_direct


def test_a_parameter_without_gradients_stops_no_direct_call() -> None:
    """As an unused layer; its first one comes later."""
    twins = Twins(adamw)
    for step in range(6):
        for params in twins.params:
            give_gradients(params, step)
            params[1].grad = params[1].grad if step > 3 else None
        twins.stepper.step()
        call_fused(twins.torchs, None, None)
        assert same(everything(twins.ours), everything(twins.torchs))
        assert twins.stepper.was_direct is (step not in (0, 4))  # where torch makes state


@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamW(params, lr=0.1, fused=True),
        lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_f10_a_gradient_laid_out_unlike_its_parameter(make: Any) -> None:
    """torch's kernels take no notice of strides."""
    found = []
    for is_ours in (True, False):
        params = parameters()
        optimizer = make(params)
        stepper = InlineStepper(optimizer)
        for step in range(3):
            give_gradients(params, step)
            if is_ours:
                for p in params:
                    if p.grad is not None and p.ndim == 2:
                        p.grad = p.grad.t().contiguous().t()
                stepper.step()
            else:
                optimizer.step()
        found.append(everything(optimizer))
    assert same(*found)
