"""State dicts that are kept, hooks and groups, as scripts use them: numbers of torch alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from async_support import take_turns
from support import same
from telemetry_runs import attached
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS, WITHOUT_GRADIENTS = 8, 4
MODES = {"sync": "", "overlap": "", "auto": "IIBBIBIIB", "auto, beside first": "BIBBIIBBI"}
Event = Callable[[Any, dict[str, Any], int], None]
"""Changes an optimizer at the start of a window; may keep something."""


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])


def adamw(model: Any, is_fused: bool = True) -> torch.optim.Optimizer:
    groups = [{"params": list(layer.parameters())} for layer in model]
    return torch.optim.AdamW(groups, lr=0.01, fused=is_fused)


def in_python(model: Any) -> torch.optim.Optimizer:
    return adamw(model, is_fused=False)


def train(model: Any, optimizer: Any, event: Event, backward: Any, skips: int) -> Any:
    kept: dict[str, Any] = {}
    for window in range(WINDOWS):
        event(optimizer, kept, window)
        if window != skips:
            r = torch.Generator().manual_seed(window)
            backward((model(torch.randn(5, 40, generator=r)) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def both(mode: str, made: Any, event: Event, setup: Any = None, skips: int = -1) -> tuple[Any, Any]:
    """What a run leaves: ours, and a plain loop's."""
    setup = setup or (lambda optimizer: None)
    plain = model_of()
    reference = made(plain)
    setup(reference)
    expected = train(plain, reference, event, torch.Tensor.backward, skips)
    with attached(step_mode=mode.partition(",")[0], precision="no") as accelerator:
        ours = model_of()
        inner = made(ours)
        setup(inner)
        model, optimizer = accelerator.prepare(ours, inner)
        if MODES[mode]:
            take_turns(optimizer, MODES[mode])
        found = train(model, optimizer, event, accelerator.backward, skips)
        return found, expected


def copy_is_loaded_again(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """torch's load keeps the tensors that it is given, so the optimizer steps them, too."""
    if window == 2:
        kept["best"] = deepcopy(optimizer.state_dict())
    if window in (3, 5, 6):
        optimizer.load_state_dict(kept["best"])


def own_is_loaded_again(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    if window == 2:
        kept["best"] = optimizer.state_dict()
    if window in (3, 5, 6):
        optimizer.load_state_dict(kept["best"])


def counts_are_reset(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """The entries of a state dict are the optimizer's own."""
    for entry in optimizer.state_dict()["state"].values() if window == 3 else ():
        entry["step"] = torch.tensor(0.0)


def averages_are_reset(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    for entry in optimizer.state_dict()["state"].values() if window == 3 else ():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])


def group_is_removed(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    for p in optimizer.param_groups.pop()["params"] if window == 3 else ():
        optimizer.state.pop(p, None)


def nothing(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """No event."""


@pytest.mark.parametrize("made", [adamw, in_python])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "event",
    [
        copy_is_loaded_again,
        own_is_loaded_again,
        counts_are_reset,
        averages_are_reset,
        group_is_removed,
    ],
)
def test_state_dicts_are_what_they_are_in_torch(event: Event, mode: str, made: Any) -> None:
    found, expected = both(mode, made, event)
    assert same(found, expected)


def decays(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)


def halves_averages(optimizer: Any, *_: Any) -> None:
    for entry in optimizer.state.values():
        if "exp_avg" in entry:
            entry["exp_avg"].mul_(0.5)


def brings_gradients(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 0.25) if p.grad is None else p.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("when", "hook"),
    [
        ("pre", decays),
        ("post", decays),
        ("pre", halves_averages),
        ("post", halves_averages),
        ("pre", brings_gradients),
    ],
)
def test_step_hooks_run_where_they_run_in_torch(when: str, hook: Any, mode: str) -> None:
    """Also in a window without gradients; those after a step see its state."""

    def setup(optimizer: Any) -> None:
        getattr(optimizer, f"register_step_{when}_hook")(hook)

    found, expected = both(mode, adamw, nothing, setup, skips=WITHOUT_GRADIENTS)
    assert same(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_momentum(mode: str) -> None:
    def run(model: Any, optimizer: Any, backward: Any) -> Any:
        for window in range(WINDOWS):
            r = torch.Generator().manual_seed(window)
            backward((model(torch.randint(0, 10, (5,), generator=r)) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    expected = run(*made(), torch.Tensor.backward)
    with attached(step_mode=mode.partition(",")[0], precision="no") as accelerator:
        model, optimizer = accelerator.prepare(*made())
        assert same(run(model, optimizer, accelerator.backward), expected)
