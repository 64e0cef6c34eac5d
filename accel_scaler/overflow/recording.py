"""What is kept of a window, so that it can be run again.

``WindowRecording`` keeps references: what each forward was given, the random state, autocast, and
the gradients that came to the outputs, so that it does not matter what the loss was made of.
Nothing is read from the device; only buffers that forwards write to are copied.
"""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..devices import is_capturing
from ..models import is_in_backward, is_replaying, is_transformed, unwrap
from ..scaling import local, parameters_of
from .hooks import ForwardListener, Hook, is_tensor, map_tensors, tensors_in
from .trace import is_batched

MAX_BYTES = 1 << 28
"""The most that is kept of one window: inputs, gradients and random states."""

BYTES_OF_RANDOM_STATE = 1 << 14


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


Source: TypeAlias = "tuple[ForwardCall, int]"
"""A forward, and the number of a tensor of its output."""


class _Kept(NamedTuple):
    """A tensor that a forward was given, detached; or the gradient of a tensor of its output."""

    tensor: Tensor
    version: int
    requires_grad: bool = False
    source: Source | None = None
    """The recorded forward that had returned it, if one had."""


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One training forward of a watched model, or one ``compute_loss`` of a Trainer."""

    run: weakref.ref[Any]
    """What was called; a model without wrappers other than DDP's."""
    syncs: weakref.WeakSet[DistributedDataParallel]
    """The wrappers that reduce gradients in its backward."""
    device: torch.device
    backward: int
    """The number of the backward that reaches it."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[_Kept]
    restore_random_state: Callable[[], None]
    autocast: list[torch.autocast]
    number: int
    """The number of this forward in the run."""
    buffers: list[_Buffer]
    grads: dict[int, _Kept] = field(default_factory=dict)
    """The gradients of its output, by the number of the tensor in it."""
    last: dict[int, Tensor] = field(default_factory=dict)
    """The last element of these output tensors."""
    roots: list[Any] = field(default_factory=list)
    """The graph that inputs came with: nodes, and the numbers of their outputs."""


T = TypeVar("T")

MOVED = (
    "its parameters were changed, or with step_mode='delayed' read, between a forward and the step"
)


class _Buffer(NamedTuple):
    """A buffer, as it was before a forward."""

    place: dict[str, Any]
    """The ``_buffers`` of its module."""
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    """None: no forward is known to write to it."""

    @property
    def is_written(self) -> bool:
        """Whether it was written to since. A batch norm's writes raise no version counter."""
        if self.name in ("running_mean", "running_var"):
            return True
        return self.place.get(self.name) is not self.tensor or _version(self.tensor) != self.version

    def restore(self) -> None:
        """Make it what it was; version counters stay."""
        if self.copy is not None:
            self.place[self.name] = self.tensor
            self.tensor.data.copy_(self.copy)


class WindowRecording(ForwardListener):
    """Keeps what the forwards of the present window were given; with ``makes_again`` also what is
    needed to make its gradients again: buffers before, and gradients after each backward.

    Leaves out forwards without gradients, those inside another watched model's forward or inside a
    transform of ``torch.func``, and those of which a graph is captured.
    """

    def __init__(self, makes_again: bool = False) -> None:
        super().__init__()
        self.calls: list[ForwardCall] = []
        """Forwards of this window, and before them earlier ones whose backward came in it."""
        self.backwards = 0
        self.losses: list[Tensor] = []
        self.left_out = ""
        """Why a forward was not recorded."""
        self.makes_again = makes_again
        self.frozen: list[set[int]] = []
        """For each backward, the ``id`` of parameters that did not require gradients."""
        self.synced: list[bool] = []
        """For each backward, whether it left gradients on parameters: FSDP2 may hold them back."""
        self.models: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        """Models without wrappers, in the order in which they were prepared."""
        self.parallel: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.changed = ""
        """Why gradients that are made again would differ; "" while nothing says so."""
        self._grads: dict[int, tuple[Tensor | None, int]] = {}
        """By the ``id`` of a parameter: its gradient and that one's version, as backwards left
        them."""
        self.is_proven = False
        """A window was made again, and its forwards wrote to no parameter."""
        self._versions: list[int] = []
        """The version counter of every parameter, before the first backward."""
        self.held: dict[int, Tensor] = {}
        """By the ``id`` of a parameter: the largest magnitude in its gradient before the window."""
        self.largest: dict[int, Tensor] = {}
        """The same of the gradient that the window has given it."""
        self._outputs: Any = WeakTensorKeyDictionary()
        """What forwards have returned, and its ``Source``."""
        self._outside: set[Source] = set()
        """Outputs that code outside of recorded forwards has made a loss or an input of."""
        self._key = object()
        """The key of our entry in the metadata of the nodes of outputs."""
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        """Each buffer as it was before the last forward of its model."""
        self._written: set[tuple[int, str]] = set()
        """Buffers that some forward has written to."""
        self._forwards = 0
        self._stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many forwards there were before the last update of each optimizer."""
        self._is_over = True
        self._bytes = 0

    def watch(self, prepared: Module, inner: Module) -> None:
        """Record this model's training forwards. Does nothing the second time.

        Args:
            prepared: what the training loop calls.
            inner: the model in it.
        """
        plain = unwrap(inner)
        is_compiled = isinstance(prepared, torch._dynamo.OptimizedModule)
        hooked = prepared if is_compiled else plain
        # With autocast in the compiler's wrapper alone it would run without autocast.
        is_outside = "_original_forward" in vars(plain) and "forward" not in vars(plain)
        is_scripted = isinstance(plain, torch.jit.ScriptModule)
        if hooked not in self._modules and not is_outside and not is_scripted:
            run: Any = prepared._orig_mod if is_compiled else prepared
            if isinstance(run, DistributedDataParallel):
                self.parallel.add(run)
            self.models.setdefault(plain)
            is_wrapped = isinstance(run, DistributedDataParallel)
            self._listen(hooked, weakref.ref(run if is_wrapped else plain), prepend=True)

    def call(self, method: Callable[..., T], model: Module, *args: Any, **kwargs: Any) -> T:
        """``method(model, *args, **kwargs)``, a Trainer's ``compute_loss``, as one forward."""
        run, output = weakref.WeakMethod(method), None
        self.enter(run, model, (model, *args), kwargs)
        try:
            output = method(model, *args, **kwargs)
            return output
        finally:
            self.leave(run, model, (), output)

    def before_backward(self, loss: Tensor) -> None:
        if self._is_over:
            self.new_window()
        self._stack().clear()  # a forward that was interrupted never left
        self.backwards += 1
        self._count(_bytes(loss))
        if not self.left_out:
            self.losses.append(loss.detach())
            if self.makes_again and not self.changed:
                self._look_outside(loss)

    def _look_outside(self, loss: Tensor) -> None:
        """Walk the graph of ``loss`` but for recorded forwards: what a parameter gets from there
        would be lost where gradients are made again."""
        seen, left = set[Any](), [(loss.grad_fn, 0)]
        while left:
            node, place = left.pop()
            source = None if node is None else _sources(node, self._key).get(place)
            if source is not None:
                self._outside.add(source)
            if node is None or (node, place) in seen:
                continue
            seen.add((node, place))
            if source is not None:
                left += source[0].roots
            elif issubclass(type(getattr(node, "variable", None)), Parameter):
                self.changed = "parameters were used outside of a forward, or in a gradient penalty"
                return
            else:
                left += node.next_functions

    def look_at(self, parameters: Sequence[Tensor]) -> None:
        """Call before each backward. What changes gradients between two of them, or before the
        check, would be lost where they are made again. Does not synchronise."""
        versions = list(map(_version, parameters))
        self.frozen.append({id(p) for p in parameters if not p.requires_grad})
        if self.backwards <= 1:
            self.held, self._versions = largest_of(parameters), versions
        elif versions != self._versions:
            self.changed = MOVED
        elif all(p.grad is None for p in parameters) and self.synced[-1:] == [True]:
            # They were dropped, with all that came before.
            self.calls = [call for call in self.calls if call.backward >= self.backwards - 1]
            self.held = {}
        else:
            self.look_before_check(parameters)
        self.note(parameters)

    def look_after(self, parameters: Sequence[Tensor]) -> None:
        """Call after each backward."""
        self.synced.append(self._are_changed(parameters))
        self.note(parameters)

    def look_before_check(self, parameters: Sequence[Tensor]) -> None:
        """Call before gradients are unscaled or clipped."""
        if self._are_changed(parameters):
            self.changed = "its gradients were changed after the backward"

    def note(self, parameters: Sequence[Tensor]) -> None:
        """These gradients are those of the window."""
        grads = [(id(p), p.grad) for p in parameters]
        self._grads |= {key: (g, _version(g)) for key, g in grads}

    def difference(self, parameters: Sequence[Tensor], scale: float, factor: float) -> str:
        """How gradients that were made again differ from those of the window, which may have been
        unscaled already; "": they do not. Synchronises."""
        now = {key: float(each) for key, each in largest_of(parameters).items()}
        largest = max(filter(math.isfinite, now.values()), default=0.0)
        for p in parameters:
            then, again = float(self.largest[id(p)]), now.get(id(p), 0.0)
            if then != 0.0 and not self._are_changed([p]):
                return "a parameter got a gradient that no recorded forward gives"
            away = min(abs(again - then * factor), abs(again - then * scale))
            if math.isfinite(away) and away > 0.01 * largest * bool(then):
                if away < 0.1 * largest:  # rounding, which doubles each time that the scale halves
                    return "float16 has lost bits at this scale: more than 1% of a finite gradient"
                return "a finite gradient came out different: it was changed, or made by a hook"
        return ""

    def _are_changed(self, parameters: Sequence[Tensor]) -> bool:
        known = self._grads
        return any(
            p.grad is not grad or _version(grad) != version
            for p in parameters
            if id(p) in known
            for grad, version in (known[id(p)],)
        )

    def new_window(self) -> None:
        self._drop()
        self.backwards = self._bytes = 0
        self.left_out = self.changed = ""
        self._is_over = False

    def _keep_buffers(self, models: Iterable[Module]) -> list[_Buffer]:
        """Copy those that forwards write to; the first time all."""
        found = []
        for place in (module._buffers for model in models for module in model.modules()):
            for name, b in place.items():
                key, last = (id(place), name), self._buffers.get((id(place), name))
                if b is None:
                    continue
                if last is not None and last.is_written:
                    self._written.add(key)
                copy = b.detach().clone() if last is None or key in self._written else None
                self._buffers[key] = _Buffer(place, name, b, _version(b), copy)
                found.append(self._buffers[key])
        self._count(sum(_bytes(b.copy) for b in found if b.copy is not None))
        return found

    def note_step(self, optimizer: Optimizer) -> None:
        """Call after this optimizer has updated its parameters."""
        self._stepped[optimizer] = self._forwards

    def end_window(self) -> None:
        super().end_window()
        self._grads = {}  # let the gradients go

    @property
    def used(self) -> list[ForwardCall]:
        """The forwards that a backward has reached."""
        return [call for call in self.calls if call.grads]

    def obstacle(self) -> str:
        """Why the window cannot be run again; "" if it can. Does not synchronise."""
        if self.left_out:
            return f"a forward was not recorded: {self.left_out}"
        if not self.used:
            return "no forward of a prepared model, with accelerator.backward(), was seen in it"
        for call in self.used:
            if call.run() is None:
                return "a model that ran in it is gone"
            kept = (*call.inputs, *call.grads.values())
            if any(each.version != _version(each.tensor) for each in kept):
                return "an input, or the gradient of an output, was changed in place since"
        return ""

    def obstacle_for(self, parameters: Sequence[Tensor], every: Sequence[Tensor]) -> str:
        """Why the gradients of ``parameters`` cannot be made again, in a window that can be run
        again; ``every``: all parameters that are stepped. Synchronises."""
        if self.changed:
            return self.changed
        if self._versions != list(map(_version, every)):
            return MOVED
        if not self.backwards or len(self.synced) != self.backwards:
            return "a backward in it was not accelerator.backward()"
        for call in self.used:
            if any(each.is_written and each.copy is None for each in call.buffers):
                return "a buffer was written to for the first time"
            steps = [o for o, number in self._stepped.items() if number >= call.number]
            run = call.run() if steps else None
            own = [run] if isinstance(run, Module) else self.models
            later = {id(p) for o in steps for p in parameters_of(o)}
            if later and not later.isdisjoint(id(p) for model in own for p in model.parameters()):
                return "its parameters were updated since a forward of an earlier window"
        if self.dirty.intersection(map(id, parameters)):
            return "its gradients were added to those of an earlier window"
        return ""

    @property
    def dirty(self) -> set[int]:
        """The ``id`` of parameters that had a gradient, other than zero, before the window."""
        return {key for key, norm in self.held.items() if float(norm) != 0.0}

    def passing(self, changes_model: bool = False) -> set[Source] | None:
        """Outputs whose gradients the backward makes again, for they all came through recorded
        forwards: another one, or its own (an encoder's output, which the decoder inside used, too).
        None: some gradient that came to another output cannot be used. Synchronises.

        Args:
            changes_model: only what came to a loss is of use, as outputs will be others.
        """
        found: set[Source] = set()
        for call in self.used:
            for number, grad in call.grads.items():
                is_finite = bool(local(grad.tensor).isfinite().all())
                if is_finite and not changes_model:
                    continue
                if (call, number) not in self._outside:
                    found.add((call, number))
                elif grad.tensor.numel() != 1 or not is_finite:
                    return None
        return found

    @torch.no_grad()
    def restore_statistics(self) -> None:
        """Put back buffers, such as running statistics, that are no longer finite: no later window
        would remove inf or NaN from them. Synchronises."""
        for each in (each for call in reversed(self.calls) for each in call.buffers):
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
        for number, tensor in enumerate(tensors_in(output)):
            if tensor.grad_fn is not None:
                # The graph keeps the call, so that a backward in a later window finds it.
                # As a node's, it comes after those of the script on the tensor.
                node, place = tensor.grad_fn, tensor.output_nr
                node.register_prehook(Hook(self, "add_gradient", call, number, place))
                if self.makes_again:
                    _sources(node, self._key)[place] = call, number
                    if not isinstance(module, torch._dynamo.OptimizedModule):
                        call.last |= last_of(tensor, number)
                if self.makes_again and len(self.models) > 1:
                    self._outputs[tensor] = call, number
        self._add(call, len(self.calls))

    def add_gradient(self, call: ForwardCall, number: int, place: int, grads: Any) -> None:
        grad = grads[place]
        if not is_tensor(grad) or is_transformed() or is_batched(grad) or is_replaying():
            return
        if self.makes_again and self.backwards == len(self.synced):
            return  # torch.autograd.grad: parameters get nothing
        if call not in self.calls:  # of an earlier window, as a generator's
            self._add(call, 0)
        self._count(_bytes(grad))
        backward = max(self.backwards - 1, 0)
        if torch.is_grad_enabled():
            self.left_out = "its gradient is differentiated itself (create_graph=True)"
        if number in call.grads or (call.grads and call.backward != backward):
            self.left_out = "two backwards went through it (retain_graph=True)"
        if not self.left_out:
            call.backward = backward
            call.grads[number] = _Kept(grad, _version(grad))

    def _call(
        self, run: weakref.ref[Any], module: Module, args: Any, kwargs: dict[str, Any]
    ) -> ForwardCall | None:
        inputs, roots = list[_Kept](), list[Any]()

        def detach(tensor: Tensor) -> Tensor:
            plain = tensor.detach() if tensor.requires_grad else tensor
            source = self._outputs.get(tensor) if self._outputs else None
            inputs.append(_Kept(plain, _version(tensor), tensor.requires_grad, source))
            if source is not None:
                roots.extend(source[0].roots)
            elif self.makes_again and tensor.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                roots.append((edge.node, edge.output_nr))
            return plain

        try:
            args, kwargs = map_tensors((args, kwargs), detach)
        except Exception as error:  # raised by the user's containers; the forward goes on
            self.left_out = f"its inputs cannot be copied ({type(error).__name__}: {error})"
            return None
        first = next(module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        autocast = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        ]
        self._forwards += 1
        return ForwardCall(
            run,
            weakref.WeakSet(m for m in self.parallel if m.require_backward_grad_sync),
            device,
            self.backwards,
            args,
            kwargs,
            inputs,
            random_state(device),
            autocast,
            self._forwards,
            self._keep_buffers([unwrap(module)]) if self.makes_again else [],
            roots=roots,
        )

    def _add(self, call: ForwardCall, place: int) -> None:
        self._count(sum(_bytes(each.tensor) for each in call.inputs) + BYTES_OF_RANDOM_STATE)
        if not self.left_out:
            self.calls.insert(place, call)

    def _count(self, size: int) -> None:
        """Drops all that is kept where it becomes too much."""
        self._bytes += size
        if self._bytes > MAX_BYTES and not self.left_out:
            self._drop()
            self.left_out = f"its inputs and gradients take more than {MAX_BYTES >> 20} MiB"

    def _drop(self) -> None:
        for call in self.calls:
            call.grads.clear()  # a graph may keep the call
        self.calls, self.losses, self.synced, self.frozen = [], [], [], []
        self._outside, self._grads, self.held, self.largest = set(), {}, {}, {}


def largest_of(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """By the ``id`` of each parameter that has a gradient, that one's largest magnitude, shape ();
    0 of an empty one. Does not synchronise."""
    found = {}
    for p, grad in ((p, local(p.grad)) for p in parameters if p.grad is not None):
        values = grad._values() if grad.is_sparse else grad
        ends = torch.stack(torch.aminmax(values)) if values.numel() else torch.zeros(1)
        found[id(p)] = ends.abs().amax()
    return found


def _sources(node: Any, key: object) -> dict[int, Source]:
    """The outputs of forwards among those of a node."""
    found: dict[int, Source] = node.metadata.setdefault(key, {})
    return found


def last_of(tensor: Tensor, number: int) -> dict[int, Tensor]:
    """Its last element by ``number``, shape (); nothing where it has none of its own."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return {}
    return {number: tensor.detach()[(-1,) * tensor.dim()].clone()}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(tensor: Tensor | None) -> int:
    if tensor is None or tensor.is_inference():
        return 0
    # FSDP2 adds to a DTensor's shard, autograd under tensor parallelism to the DTensor.
    return tensor._version + (0 if type(tensor) is Tensor else local(tensor)._version)
