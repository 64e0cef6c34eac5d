"""What is recorded of a window, for how long, and why a window cannot be run again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler.overflow import recording as module
from accel_scaler.overflow.recording import WindowRecording
from accel_scaler.overflow.rerun import run_again

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Its second layer is beyond float16 under autocast."""

    def __init__(self, before: Callable[[Tensor], Any] = Tensor.detach) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = before
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.layers[1].weight.data *= 1e6

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        self.before(x)
        with torch.autocast("cpu", dtype=torch.float16):
            out: Tensor = self.layers(x)
        return out.float().square().mean()


def recorded(net: nn.Module, prepared: Any = None) -> WindowRecording:
    parameters: list[Any] = list(net.parameters())
    recording = WindowRecording(lambda: parameters)
    recording.watch(net if prepared is None else prepared, net)
    return recording


def window(recording: WindowRecording, net: nn.Module, *given: Any) -> None:
    loss = net(*given)
    recording.before_backward(loss)
    loss.backward()


def module_of(recording: WindowRecording) -> str:
    assert recording.obstacle() == ""
    origin = run_again(recording)
    assert origin is not None
    return origin.module


def test_a_compiled_model_is_run_without_the_compiler() -> None:
    net = Net()
    compiled: Any = torch.compile(net, backend="eager")
    recording = recorded(net, compiled)
    window(recording, compiled, torch.ones(2, 4))
    assert len(recording.calls) == 1
    assert module_of(recording) == "layers.1"


def test_a_model_whose_autocast_is_outside_of_it_is_not_run_again() -> None:
    net: Any = Net()
    net._original_forward = net.forward  # as Accelerate leaves a model compiled before
    compiled: Any = torch.compile(net, backend="eager")
    recording = recorded(net, compiled)
    window(recording, compiled, torch.ones(2, 4))
    assert recording.obstacle().startswith("no forward of a prepared model")


@pytest.mark.parametrize("inside", [False, True])
def test_an_input_that_was_changed_in_place(inside: bool) -> None:
    net, x = Net(lambda x: x.mul_(2)) if inside else Net(), torch.ones(2, 4)
    recording = recorded(net)
    window(recording, net, x)
    if not inside:
        x.add_(1)
    assert "was changed in place" in recording.obstacle()


def test_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in one forward nor where a loop never steps; the next window is recorded again."""
    monkeypatch.setattr(module, "MAX_BYTES", 4 * module.BYTES_OF_RANDOM_STATE)
    net, refs = Net(), []
    recording = recorded(net)
    for size in (2, 1 << 12):
        for _ in range(5):
            x = torch.ones(size, 4)
            refs.append(weakref.ref(x))
            window(recording, net, x)
        del x
        assert "take more than" in recording.obstacle()
        assert all(ref() is None for ref in refs)
        recording.end_window()
    window(recording, net, torch.ones(2, 4))
    assert module_of(recording) == "layers.1"


def test_a_forward_without_gradients_is_not_recorded() -> None:
    net = Net()
    recording = recorded(net)
    with torch.no_grad():
        net(torch.ones(2, 4))
    assert recording.calls == []
    assert recording.obstacle().startswith("no forward of a prepared model")


def test_nothing_is_kept_alive_past_the_window() -> None:
    net = Net()
    recording = recorded(net)
    x, more = torch.ones(2, 4), {"mask": torch.ones(3)}
    refs = [weakref.ref(x), weakref.ref(more["mask"])]
    window(recording, net, x, more)
    del x, more
    assert all(ref() is not None for ref in refs)
    recording.end_window()
    window(recording, net, torch.ones(1, 4))
    gc.collect()
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_parameters_and_random_state_are_put_back_whatever_is_raised(error: BaseException) -> None:
    def fail(x: Tensor) -> None:
        torch.rand(())
        if fails:
            raise error

    fails, net = False, Net(fail)
    recording = recorded(net)
    window(recording, net, torch.ones(2, 4))
    before = [(p, p.grad) for p in net.parameters()]
    torch.rand(3)  # else it ends where running again does
    state, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in net.modules()]
    fails = True
    with pytest.raises(type(error)):
        run_again(recording)
    for p, (q, grad) in zip(net.parameters(), before, strict=True):
        assert p is q
        assert p.grad is grad
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks == [len(m._forward_hooks) for m in net.modules()]
    fails = False
    assert module_of(recording) == "layers.1"


def test_a_backward_that_is_differentiated_itself_is_not_run_again() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    recording = recorded(net)
    loss = net(torch.ones(2, 4)).sum()
    recording.before_backward(loss)
    loss.backward(create_graph=True)
    assert "(create_graph=True)" in recording.obstacle()


def test_a_buffer_that_a_forward_replaces_is_put_back() -> None:
    net = Net(lambda _: setattr(net, "count", net.count + 1))
    net.register_buffer("count", torch.zeros(()))
    recording = recorded(net)
    window(recording, net, torch.ones(2, 4))
    count = net.count
    assert module_of(recording) == "layers.1"
    assert net.count is count
    assert count == 1


def test_a_gradient_penalty_is_not_made_again() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    recording, x = recorded(net), torch.ones(2, 4).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    loss = slope.square().sum()
    recording.before_backward(loss)
    loss.backward()
    recording.after_backward()
    why = recording.obstacle_to_gradients(list(net.parameters()))
    assert "in a gradient penalty" in why
