"""State dicts that are kept, hooks and groups, as scripts use them: numbers of torch alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from support import same
from telemetry_runs import attached
from torch import nn

from accel_scaler import UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS, WITHOUT_GRADIENTS = 8, 4
MODES = ["sync", "overlap"]
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
    with attached(step_mode=mode, precision="no") as accelerator:
        ours = model_of()
        inner = made(ours)
        setup(inner)
        model, optimizer = accelerator.prepare(ours, inner)
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


def entries_are_replaced(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """The entries of a state dict are the optimizer's own."""
    for entry in optimizer.state_dict()["state"].values() if window == 3 else ():
        entry.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(entry["exp_avg"]))


def group_is_removed(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    for p in optimizer.param_groups.pop()["params"] if window == 3 else ():
        optimizer.state.pop(p, None)


def note_is_kept(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """torch saves what is under keys that are no parameters, too."""
    if window == 3:
        optimizer.state["note"] = 3


def handles_of(state: Any) -> list[Any]:
    """Weak references to all tensors in the state, and to their memory but for the counts'."""
    values = [value for entry in state.values() for value in entry.values()]
    return [
        *map(weakref.ref, values),
        *(weakref.ref(v.untyped_storage()) for v in values if v.dim()),
    ]


def assert_freed(handles: list[Any]) -> None:
    assert handles
    if any(handle() is not None for handle in handles):
        gc.collect()  # which takes long where many libraries are loaded
    assert sum(handle() is not None for handle in handles) == 0


def copies_of(state: Any) -> Any:
    return {p: {key: v.clone() for key, v in entry.items()} for p, entry in state.items()}


def values_are_moved_away(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """As reinforcement learning does, to make room for its sampler."""
    if window in (3, 5):
        state = optimizer.state
        handles, copies = handles_of(state), copies_of(state)
        for p, entry in state.items():
            entry.update(copies[p])
        assert_freed(handles)


def state_is_moved_away(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """All of it, and back before the next step."""
    if window in (3, 5):
        state = optimizer.state
        handles, copies = handles_of(state), copies_of(state)
        state.clear()
        assert_freed(handles)
        state.update(copies)


def state_is_replaced(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """As a load replaces it."""
    if window in (3, 5):
        handles, saved = handles_of(optimizer.state), deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        assert_freed(handles)


def state_is_read(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """A read is a fence."""
    if window in (3, 5):
        assert optimizer.state


def nothing(optimizer: Any, kept: dict[str, Any], window: int) -> None:
    """No event."""


@pytest.mark.parametrize("made", [adamw, in_python])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "event",
    [
        copy_is_loaded_again,
        own_is_loaded_again,
        entries_are_replaced,
        group_is_removed,
        note_is_kept,
    ],
)
def test_state_dicts_are_what_they_are_in_torch(event: Event, mode: str, made: Any) -> None:
    found, expected = both(mode, made, event)
    assert same(found, expected)


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


MOVES = [values_are_moved_away, state_is_moved_away, state_is_replaced]


@pytest.mark.parametrize("made", [adamw, in_python])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("event", MOVES)
def test_state_that_is_moved_away_is_freed(event: Event, mode: str, made: Any) -> None:
    found, expected = both(mode, made, event)
    assert same(found, expected)


@pytest.mark.parametrize("made", [adamw, momentum])
@pytest.mark.parametrize(("precision", "mode"), [("bf16", "sync"), ("fp16", "overlap")])
def test_state_of_masters_that_is_moved_away_is_freed(precision: str, mode: str, made: Any) -> None:
    def run(event: Event) -> Any:
        settings = {"step_mode": mode, "master_weights": "fp32", "precision": precision}
        with attached(**settings) as accelerator:
            ours = model_of().to(torch.bfloat16 if precision == "bf16" else torch.float16)
            model, optimizer = accelerator.prepare(ours, made(ours))
            return train(model, optimizer, event, accelerator.backward, skips=-1)

    expected = run(state_is_read)
    assert all(same(run(event), expected) for event in MOVES)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_around_a_load_see_what_they_see_in_torch(mode: str) -> None:
    """torch's documentation maps states by name so: here each layer gets its neighbour's."""

    def swaps(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": {k ^ 2: entry for k, entry in state_dict["state"].items()}}

    def clears(optimizer: Any) -> None:
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()

    def setup(optimizer: Any) -> None:
        optimizer.register_load_state_dict_pre_hook(swaps)
        optimizer.register_load_state_dict_post_hook(clears)

    def event(optimizer: Any, kept: dict[str, Any], window: int) -> None:
        if window == 4:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))

    found, expected = both(mode, adamw, event, setup)
    assert same(found, expected)


def test_a_hook_that_would_not_see_the_state_is_refused_before_it_is_loaded() -> None:
    with attached(precision="bf16", master_weights="fp32") as accelerator:
        ours = model_of().to(torch.bfloat16)
        inner = adamw(ours)
        model, optimizer = accelerator.prepare(ours, inner)
        train(model, optimizer, nothing, accelerator.backward, skips=-1)
        saved = deepcopy(optimizer.state_dict())
        handle = inner.register_load_state_dict_pre_hook(lambda *_: None)
        with pytest.raises(UnsupportedError, match="Register it before"):
            optimizer.load_state_dict(deepcopy(saved))
        assert same(optimizer.state_dict(), saved)
        handle.remove()
        optimizer.load_state_dict(saved)


def decays(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)


def halves_averages(optimizer: Any, *_: Any) -> None:
    for entry in optimizer.state.values():
        if "exp_avg" in entry:
            entry["exp_avg"].mul_(0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("when", "hook"),
    [
        ("pre", decays),
        ("post", decays),
        ("pre", halves_averages),
        ("post", halves_averages),
    ],
)
def test_step_hooks_run_where_they_run_in_torch(when: str, hook: Any, mode: str) -> None:
    """Also in a window without gradients; those after a step see its state."""

    def setup(optimizer: Any) -> None:
        getattr(optimizer, f"register_step_{when}_hook")(hook)

    found, expected = both(mode, adamw, nothing, setup, skips=WITHOUT_GRADIENTS)
    assert same(found, expected)
