"""The record of a window, from which it can be made again.

- A *forward* (:class:`ForwardCall`) is one training call of a prepared model, or of a Trainer's
  ``compute_loss``, with its inputs. A model that is called inside of a forward is a part of it.
- An *output* is a tensor with a graph that a forward has returned.
- A *root* is an output that code outside of forwards has used: the script has made a loss of it, or
  it is the loss.
- A *backward* is one ``accelerator.backward()``, with its roots and the gradients that have come to
  them.

There is one way to make a window again: its forwards run again, and each backward starts at its
roots, from the gradients that had come to them, times the ratio of the scales. So it does not
matter how the loss was computed. A forward whose input comes with a graph (a critic's, of what a
generator made) is not recorded, nor is its window.

The record holds references, and copies of small buffers. Nothing is read from the device.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from ..devices import is_capturing
from ..models import is_in_backward, is_replaying, is_transformed, unwrap
from ..scaling import local
from .gradients import WindowGradients, version_of
from .hooks import ForwardListener, Hook, map_tensors, tensors_in

MAX_BYTES = 1 << 28
"""The most that is kept of one window: inputs, gradients and random states."""

BYTES_OF_RANDOM_STATE = 1 << 14

MAX_COPIED = 1 << 16
"""The elements of the largest buffers that are copied before each forward."""


class Kept(NamedTuple):
    """A tensor that a forward was given, detached; or the gradient of an output."""

    tensor: Tensor
    version: int
    requires_grad: bool = False


class KeptBuffer(NamedTuple):
    """A buffer of a model, as it was before a forward."""

    place: dict[str, Any]
    """The ``_buffers`` of its module."""
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    """None: it is too large."""

    def restore(self) -> None:
        """Give the buffer its earlier values; version counters stay."""
        if self.copy is not None:
            self.place[self.name] = self.tensor
            self.tensor.data.copy_(self.copy)


@dataclass(eq=False, slots=True)
class ForwardCall:
    """A forward, as the head of this file defines it."""

    run: weakref.ref[Any]
    """The model, without wrappers other than DDP's; or the method ``compute_loss``."""
    syncs: weakref.WeakSet[DistributedDataParallel]
    """The wrappers that reduce gradients in the backward of this forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Kept]
    restore_random_state: Callable[[], None]
    autocast: list[tuple[str, torch.dtype, bool]]
    """For each device type: dtype, and whether autocast was on."""
    number: int
    """The number of this forward in the run."""
    buffers: list[KeptBuffer]
    backward: Backward | None = None
    """The backward that has reached this forward."""


@dataclass(eq=False, slots=True)
class Output:
    """An output, as the head of this file defines it."""

    call: ForwardCall
    number: int
    """The place of the tensor in all that the forward returned."""
    last: Tensor | None
    """The last element of the tensor, shape (), to compare."""


@dataclass(eq=False, slots=True)
class Backward:
    """A backward, as the head of this file defines it."""

    loss: Tensor
    roots: list[Output] = field(default_factory=list)
    seeds: dict[Output, Kept] = field(default_factory=dict)
    """The gradients that came to the roots."""
    has_ended: bool = False
    has_given: bool = False
    """Whether the backward left gradients on parameters: FSDP2 may hold them back."""

    @property
    def calls(self) -> list[ForwardCall]:
        """The forwards of the roots, in the order in which they ran."""
        return sorted({output.call for output in self.roots}, key=lambda call: call.number)


class WindowRecording(ForwardListener):
    """Keeps the record of the present window.

    Leaves out forwards without gradients, forwards inside another watched model's forward or inside
    a transform of ``torch.func``, and forwards of which a graph is captured.

    Args:
        parameters: gives all parameters that optimizers step.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.backwards: list[Backward] = []
        self.gradients = WindowGradients(parameters)
        self.left_out = ""
        """Why a forward was not recorded."""
        self.models: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        """Models without wrappers, in the order in which they were prepared."""
        self.parallel: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._key = object()
        """The key of our entry in the metadata of a graph's nodes."""
        self._forwards = self._earlier = 0
        """How many forwards there were, and before this window."""
        self._is_over = True
        self._bytes = 0

    @property
    def calls(self) -> list[ForwardCall]:
        """The forwards that backwards of this window go through."""
        return [call for backward in self.backwards for call in backward.calls]

    @property
    def buffers(self) -> list[KeptBuffer]:
        """The buffers before these forwards, the last forward first."""
        return [each for call in reversed(self.calls) for each in call.buffers]

    @property
    def seeds(self) -> list[Kept]:
        """The gradients that came to roots."""
        return [seed for backward in self.backwards for seed in backward.seeds.values()]

    def watch(self, prepared: Module, inner: Module) -> None:
        """Record this model's training forwards. Does nothing the second time.

        Args:
            prepared: the model that the training loop calls.
            inner: the model in it.
        """
        plain = unwrap(inner)
        is_compiled = isinstance(prepared, torch._dynamo.OptimizedModule)
        hooked = prepared if is_compiled else plain
        # With autocast in the compiler's wrapper alone the model would run again without autocast.
        is_outside = "_original_forward" in vars(plain) and "forward" not in vars(plain)
        is_scripted = isinstance(plain, torch.jit.ScriptModule)
        if hooked not in self._modules and not is_outside and not is_scripted:
            run: Any = prepared._orig_mod if is_compiled else prepared
            is_wrapped = isinstance(run, DistributedDataParallel)
            if is_wrapped:
                self.parallel.add(run)
            self.models.setdefault(plain)
            self._listen(hooked, weakref.ref(run if is_wrapped else plain), prepend=True)

    def call(self, method: Callable[..., Any], model: Module, *args: Any, **kwargs: Any) -> Any:
        """``method(model, *args, **kwargs)``, a Trainer's ``compute_loss``, as one forward."""
        run, output = weakref.WeakMethod(method), None
        self.enter(run, model, (model, *args), kwargs)
        try:
            output = method(model, *args, **kwargs)
            return output
        finally:
            self.leave(run, model, (), output)

    # The events of a window.

    def before_backward(self, loss: Tensor) -> None:
        if self._is_over:
            self.new_window()
        self._stack().clear()  # a forward that was interrupted never left
        self.gradients.before_backward(is_first=not self.backwards)
        self.backwards.append(Backward(loss.detach()))
        self._find_roots(loss, self.backwards[-1])

    def _find_roots(self, loss: Tensor, backward: Backward) -> None:
        """Walk the graph of ``loss`` down to recorded forwards."""
        seen, left = set[Any](), list[Any]([(loss.grad_fn, loss.output_nr)])
        while left:
            node, place = left.pop()
            if node is None or (node, place) in seen:
                continue
            seen.add((node, place))
            output: Output | None = node.metadata.get(self._key, {}).get(place)
            if output is not None:
                self._add_root(node, place, output, backward)
            elif not issubclass(type(getattr(node, "variable", None)), Parameter):
                left += node.next_functions
            else:
                self.gradients.obstacle = (
                    "parameters were used outside of a forward, or in a gradient penalty"
                )

    def _add_root(self, node: Any, place: int, output: Output, backward: Backward) -> None:
        call = output.call
        if call.backward not in (None, backward):
            self.left_out = "two backwards go through a forward (retain_graph=True)"
        elif call.number <= self._earlier:
            self.left_out = "a backward goes through a forward of an earlier step"
        if self.left_out:
            return
        if call.backward is None:
            copies = [each.copy for each in call.buffers if each.copy is not None]
            self._bytes += sum(map(_bytes, [*(each.tensor for each in call.inputs), *copies]))
            self._bytes += BYTES_OF_RANDOM_STATE
        call.backward = backward
        backward.roots.append(output)
        node.register_hook(Hook(self, "add_gradient", backward, output, place))
        self._forget_if_large()

    def after_backward(self) -> None:
        """Call after each backward, unless it has raised an exception."""
        if self.backwards:
            self.backwards[-1].has_ended = True
            self.backwards[-1].has_given = self.gradients.after_backward()

    def end_window(self) -> None:
        super().end_window()
        self.gradients.let_go()

    def new_window(self) -> None:
        self._forget()
        self.backwards = []
        self._bytes, self.left_out, self._is_over = 0, "", False
        self._earlier = self._forwards
        self.gradients.new_window()

    # Why the window cannot be made again.

    def obstacle(self) -> str:
        """Why the window cannot run again; "": it can. Does not synchronise."""
        if self.left_out:
            return self.left_out
        if not self.calls:
            return "no forward of a prepared model, with accelerator.backward(), was seen in it"
        inputs = [each for call in self.calls for each in call.inputs]
        if any(each.version != version_of(each.tensor) for each in (*inputs, *self.seeds)):
            return "an input, or the gradient of an output, was changed in place since"
        return ""

    def obstacle_to_gradients(self, parameters: Sequence[Tensor]) -> str:
        """Why the gradients of ``parameters`` cannot be made again. Synchronises."""
        self.gradients.look_at_parameters()
        if found := self.obstacle() or self.gradients.obstacle:
            return found
        if not all(backward.has_ended for backward in self.backwards):
            return "a backward in it was not accelerator.backward()"
        for each in self.buffers:
            is_same = each.place.get(each.name) is each.tensor
            if each.copy is None and not (is_same and version_of(each.tensor) == each.version):
                return f"a buffer of more than {MAX_COPIED} elements was written to"
        if self.gradients.dirty.intersection(map(id, parameters)):
            return "its gradients were added to those of an earlier step"
        if not all(bool(local(seed.tensor).isfinite().all()) for seed in self.seeds):
            return "the gradient of an output was not finite"
        return ""

    @torch.no_grad()
    def restore_statistics(self) -> None:
        """Put back buffers, such as running statistics, that are no longer finite: no later window
        would remove inf or NaN from them. Synchronises."""
        for each in self.buffers:
            if each.copy is not None and not bool(each.tensor.isfinite().all()):
                each.tensor.copy_(each.copy)

    # Called by hooks.

    def enter(
        self, run: weakref.ref[Any], module: Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if is_replaying() or is_transformed():
            return
        stack = self._stack()
        is_inner = any(call is not None for call in stack) or is_in_backward()
        if is_inner or not torch.is_grad_enabled() or is_capturing():
            stack.append(None)
            return
        if self._is_over:
            self.new_window()
        stack.append(self._call(run, module, args, kwargs))

    def leave(self, run: weakref.ref[Any], module: Module, args: Any, output: Any) -> None:
        """A model's forward ends; by an exception if ``output`` is None."""
        if is_replaying() or is_transformed():
            return
        stack = self._stack()
        call: ForwardCall | None = stack.pop() if stack else None
        if call is None or output is None:
            return
        # A compiled model computes other numbers, and runs again uncompiled.
        compares = not isinstance(module, torch._dynamo.OptimizedModule)
        for number, tensor in enumerate(tensors_in(output)):
            if tensor.grad_fn is not None:
                last = last_of(tensor) if compares else None
                made = Output(call, number, last)
                # The graph keeps the record of the output, so that each backward finds it.
                node: Any = tensor.grad_fn
                node.metadata.setdefault(self._key, {})[tensor.output_nr] = made

    def add_gradient(
        self, backward: Backward, output: Output, place: int, _: Any, grads: Any
    ) -> None:
        """The gradient of a root has come."""
        grad = grads[place]
        if self.left_out or backward.has_ended or grad is None:
            return
        if torch.is_grad_enabled():
            self.left_out = "its gradient is differentiated itself (create_graph=True)"
            return
        backward.seeds[output] = Kept(grad, version_of(grad))
        self._bytes += _bytes(grad)
        self._forget_if_large()

    def _call(
        self, run: weakref.ref[Any], module: Module, args: Any, kwargs: dict[str, Any]
    ) -> ForwardCall:
        inputs = list[Kept]()

        def detach(tensor: Tensor) -> Tensor:
            if tensor.grad_fn is not None or issubclass(type(tensor), Parameter):
                self.left_out = "an input of a forward came with a graph, or was a parameter"
            plain = tensor.detach() if tensor.requires_grad else tensor
            inputs.append(Kept(plain, version_of(tensor), tensor.requires_grad))
            return plain

        args, kwargs = map_tensors((args, kwargs), detach)
        device = device_of(module)
        autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        ]
        self._forwards += 1
        return ForwardCall(
            run,
            weakref.WeakSet(m for m in self.parallel if m.require_backward_grad_sync),
            args,
            kwargs,
            inputs,
            random_state(device),
            autocast,
            self._forwards,
            _kept_buffers(unwrap(module)),
        )

    def _forget_if_large(self) -> None:
        if self._bytes > MAX_BYTES:
            self._forget()
            self.left_out = f"inputs and gradients in it take more than {MAX_BYTES >> 20} MiB"

    def _forget(self) -> None:
        """Drop what is kept of the window; a graph may keep its outputs."""
        for backward in self.backwards:
            for call in backward.calls:
                call.backward = None
            backward.roots.clear()
            backward.seeds.clear()


def _kept_buffers(model: Module) -> list[KeptBuffer]:
    found = []
    for place in (module._buffers for module in model.modules()):
        for name, b in place.items():
            if b is not None:
                copy = b.detach().clone() if b.numel() <= MAX_COPIED else None
                found.append(KeptBuffer(place, name, b, version_of(b), copy))
    return found


def device_of(module: Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def random_state(device: torch.device) -> Callable[[], None]:
    """A function that restores the random state of now: of Python, NumPy (where it is loaded), and
    torch on the host and on one device. Does not synchronise."""
    numpy: Any = sys.modules.get("numpy.random")
    on_python, on_host = random.getstate(), torch.get_rng_state()
    in_numpy = None if numpy is None else numpy.get_state()
    has_own = device.type not in ("cpu", "meta") and not is_capturing()
    module: Any = torch.get_device_module(device.type) if has_own else None
    on_device = module.get_rng_state(device) if hasattr(module, "get_rng_state") else None

    def restore() -> None:
        random.setstate(on_python)
        torch.set_rng_state(on_host)
        if numpy is not None:
            numpy.set_state(in_numpy)
        if on_device is not None:
            module.set_rng_state(on_device, device)

    return restore


def last_of(tensor: Tensor) -> Tensor | None:
    """The last element of a tensor, shape (); None where the tensor has none of its own."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.detach()[(-1,) * tensor.dim()].clone()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
