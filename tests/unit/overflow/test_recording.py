"""What is kept of a window, for how long, and why a window cannot be run again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler.overflow import ranges, recording
from accel_scaler.overflow.recording import WindowRecording
from accel_scaler.overflow.replay import obstacle, run_again

pytestmark = pytest.mark.usefixtures("one_thread")

HINT = "find_overflow='always' watches modules while they run"


class Net(nn.Module):
    """Its second layer is beyond float16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.layers[1].weight.data *= 1e6

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out: Tensor = self.layers(x)
        return out.float().square().mean()


def watched(net: nn.Module) -> WindowRecording:
    found = WindowRecording()
    found.watch(net, net)
    return found


def window(kept: WindowRecording, net: nn.Module, *given: Any, **named: Any) -> None:
    loss = net(*given, **named)
    kept.note_backward(loss)
    loss.backward()


def origin_of(kept: WindowRecording) -> str:
    assert obstacle(kept) == ""
    found = run_again(kept)
    assert found.differences == ()
    assert found.origin is not None
    return found.origin.module


def test_the_module_in_which_it_began() -> None:
    net = Net()
    kept = watched(net)
    window(kept, net, torch.ones(2, 4))
    assert origin_of(kept) == "layers.1"
    assert origin_of(kept) == "layers.1"  # as often as one likes
    assert run_again(kept).nonfinite == {
        f"layers.{n}.{name}" for n in (0, 1, 2) for name in ("weight", "bias")
    }


CHANGES: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: x.add_(1), "input 0 of a forward is not what it was: it was changed in place; "),
    (
        lambda x: x.untyped_storage().resize_(0),
        "input 0 of a forward is not what it was: its memory was given away; ",
    ),
]


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_data_that_are_changed_or_given_away(change: Callable[[Tensor], Any], why: str) -> None:
    net, x = Net(), torch.ones(2, 4)
    kept = watched(net)
    window(kept, net, x)
    change(x)
    assert obstacle(kept) == why + HINT


def test_a_change_that_no_version_shows_is_told_by_what_comes_out() -> None:
    net, x = nn.Sequential(nn.Linear(4, 1)), torch.ones(2, 4)
    kept = watched(net)
    out = net(x)
    kept.note_backward(out.sum())
    out.sum().backward()
    x.data.fill_(3.0)
    assert obstacle(kept) == ""
    (told,) = run_again(kept).differences
    assert told.startswith("output 0 was in [")


def test_a_forward_that_writes_to_its_input() -> None:
    class Writes(Net):
        def forward(self, x: Tensor, more: Any = None) -> Tensor:
            return super().forward(x.mul_(2))

    net = Writes()
    kept = watched(net)
    window(kept, net, torch.ones(2, 4))
    assert obstacle(kept) == (
        f"a forward was not kept: the model changes its input 0 in place; {HINT}"
    )


def test_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_BYTES", 100)
    net = Net()
    kept = watched(net)
    window(kept, net, torch.ones(2, 4))
    assert origin_of(kept) == "layers.1"
    window(kept, net, torch.ones(8, 4))
    assert "MiB are kept at most" in obstacle(kept)
    kept.end_window()
    window(kept, net, torch.ones(2, 4))
    assert origin_of(kept) == "layers.1"


def test_no_forward_with_gradients() -> None:
    net = Net()
    kept = watched(net)
    assert obstacle(kept).startswith("no forward of a prepared model")
    with torch.no_grad():
        net(torch.ones(2, 4))
    assert not kept.calls


def test_a_model_that_is_gone() -> None:
    net = Net()
    kept = watched(net)
    window(kept, net, torch.ones(2, 4))
    del net
    gc.collect()
    assert obstacle(kept) == "a model that ran in it is gone"


def test_nothing_is_kept_alive_past_the_window() -> None:
    net = Net()
    kept = watched(net)
    x = torch.ones(2, 4)
    more = {"mask": torch.ones(3)}
    refs = [weakref.ref(x), weakref.ref(more["mask"])]
    loss = net(x, more)
    kept.note_backward(loss)
    loss.backward()
    del x, more, loss
    gc.collect()
    assert all(ref() is not None for ref in refs)  # to be run again
    kept.end_window()
    window(kept, net, torch.ones(1, 4))
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_a_loop_that_never_steps_keeps_no_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_FORWARDS", 5)
    net = Net()
    kept = watched(net)
    for _ in range(20):
        window(kept, net, torch.ones(2, 4))
    assert len(kept.calls) == 5
    assert len(kept.losses) == 5
    assert "kept at most" in obstacle(kept)


def test_a_random_number_that_nobody_can_know_of() -> None:
    class Secret(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.chance = nn.Linear(4, 1), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x) * torch.rand((), generator=self.chance)
            return made

    net = Secret()
    kept = watched(net)
    out = net(torch.ones(2, 4)).sum()
    kept.note_backward(out)
    out.backward()
    assert run_again(kept).differences


def test_whatever_is_raised_parameters_and_random_state_are_put_back() -> None:
    class Sulks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.error: BaseException | None = None

        def forward(self, x: Tensor, more: Any = None) -> Tensor:
            torch.rand(())
            if self.error is not None:
                raise self.error
            return super().forward(x)

    for error in (RuntimeError("no"), KeyboardInterrupt()):
        net = Sulks()
        kept = watched(net)
        window(kept, net, torch.ones(2, 4))
        before = [(p, p.grad) for p in net.parameters()]
        state, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in net.modules()]
        net.error = error
        with pytest.raises(type(error)):
            run_again(kept)
        now = list(net.parameters())
        assert all(p is q and p.grad is g for q, (p, g) in zip(now, before, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert hooks == [len(m._forward_hooks) for m in net.modules()]
        net.error = None
        assert origin_of(kept) == "layers.1"


@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_gradient_that_is_differentiated_itself_is_not_run_again(of: str) -> None:
    """As a gradient penalty's."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    kept, x = watched(net), torch.ones(2, 4).requires_grad_()
    wanted = x if of == "input" else net[0].weight
    (slope,) = torch.autograd.grad(net(x).sum(), wanted, create_graph=True)
    loss = slope.square().sum()
    kept.note_backward(loss)
    loss.backward()
    assert "its gradient is differentiated itself (create_graph=True); " in obstacle(kept)


def test_a_wrapped_model_is_run_without_its_wrapper() -> None:
    net = Net()
    compiled: Any = torch.compile(net, backend="eager")
    kept = WindowRecording()
    kept.watch(compiled, net)
    window(kept, compiled, torch.ones(2, 4))
    assert len(kept.calls) == 1
    assert origin_of(kept) == "layers.1"


def test_thousands_of_texts_are_not_looked_at_one_by_one(monkeypatch: Any) -> None:
    """A forward that is given its tokens in words costs no more with them."""
    looked = 0
    as_it_is = ranges.tensors_in

    def counted(*given: Any) -> Any:
        nonlocal looked
        looked += 1
        return as_it_is(*given)

    monkeypatch.setattr(ranges, "tensors_in", counted)
    texts, x = ["word"] * 5000, torch.ones(2)
    found = list(ranges.tensors_in({"texts": texts, "x": [1, x]}))
    assert [path for path, _ in found] == ["x.1"]
    assert looked < 10
    changed = ranges.with_tensors((texts, x), lambda tensor: tensor + 1)
    assert changed[0] == texts
    assert changed[0] is not texts
    assert changed[1].tolist() == [2, 2]
