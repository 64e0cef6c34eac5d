"""A window that overflowed, in a file, to be run again in another process.

What is written is what a replay needs: the forwards of the micro-batch, the gradients that came to
their outputs, random state, modes, weights, and what the replay found. Tensors, numbers, texts and
plain containers alone, so that ``torch.load(weights_only=True)`` reads it. It holds the user's
data: whoever has the file has the batch and the weights.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import ConfigError, UnsupportedError, shown
from .random_state import RandomState
from .ranges import tensors_in
from .recording import ForwardCall, Kept, OutputGradient, WindowRecording
from .replay import Replay

KIND, FORMAT = "accel_scaler.overflow", 1

MOST_WEIGHTS = 4 << 30
"""Bytes of parameters and buffers in one file; a model of more is saved without."""

DEEPEST, MOST_VALUES = 24, 1 << 22
"""Nesting, and number of values, of what a file may hold."""

PLAIN = (type(None), bool, int, float, str, torch.dtype)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PostMortem:
    """What one file holds; every tensor on the CPU."""

    about: dict[str, Any]
    """Texts and numbers: versions, device, scale, window, rank."""
    model: str
    """The model's class."""
    is_training: dict[str, bool]
    """Of each module."""
    shapes: dict[str, tuple[str, tuple[int, ...], bool]]
    """Dtype, shape and ``requires_grad`` of every parameter and buffer."""
    weights: dict[str, Tensor] | None
    """Parameters and buffers; None: they are too large."""
    fp32_modules: tuple[str, ...]
    """Names of those that ran in float32."""
    calls: list[dict[str, Any]]
    losses: list[Tensor]
    backwards: int
    origin: dict[str, Any]
    """As ``Origin.as_json`` gives it."""
    nonfinite: tuple[str, ...]
    """Parameters whose gradients were inf or NaN."""
    notes: tuple[str, ...] = field(default=())
    """What is not as it was in the run."""


def capture(
    recording: WindowRecording,
    found: Replay,
    about: Mapping[str, Any],
    fp32_modules: tuple[str, ...] = (),
) -> PostMortem:
    """Take the micro-batch that overflowed, with all that it needs, to host memory.

    Synchronises with the device.

    Args:
        recording: which has been run again just now.
        found: what that has shown, an origin.
        about: plain values that are kept with it.
        fp32_modules: names of the modules that run in float32.

    Raises:
        UnsupportedError: it cannot be in a file: an argument of another kind, shards, several
            models, a gradient penalty; it says which.
    """
    origin = found.origin
    assert origin is not None
    if any(call.second for call in recording.calls):
        raise UnsupportedError("a gradient was differentiated itself (create_graph=True)")
    models = {id(model): model for c in recording.calls if (model := c.model.module()) is not None}
    if len(models) != 1:
        raise UnsupportedError("several models ran in it, and a file holds one")
    (model,) = models.values()
    first, last = origin.micro_batch, found.last
    notes: list[str] = []
    calls = [
        _call_as_plain(call, first, last, notes)
        for call in sorted(recording.calls, key=lambda call: call.order)
        if any(first <= g.backward <= last for g in call.grads)
        or (not call.grads and last + 1 >= recording.backwards)
    ]
    tensors = dict(_weights_of(model))
    names = {id(module): name for name, module in model.named_modules()}
    began = [call for call in recording.calls if any(first <= g.backward for g in call.grads)]
    for ref, own, value in min(began, key=lambda call: call.order).buffers if began else ():
        tensors[f"{names.get(id(ref()), '')}.{own}".lstrip(".")] = value  # as its forward read it
    shapes = {name: (str(t.dtype), tuple(t.shape), t.requires_grad) for name, t in tensors.items()}
    weights: dict[str, Tensor] | None = None
    if sum(t.numel() * t.element_size() for t in tensors.values()) <= MOST_WEIGHTS:
        weights = {name: _plain_tensor(t, f"the weight {name}") for name, t in tensors.items()}
    else:
        notes.append(f"the weights take more than {MOST_WEIGHTS >> 30} GiB and are not in the file")
    return PostMortem(
        dict(about),
        f"{type(model).__module__}.{type(model).__qualname__}",
        {name: module.training for name, module in model.named_modules()},
        shapes,
        weights,
        fp32_modules,
        calls,
        [_plain_tensor(loss.tensor, "a loss") for loss in recording.losses[: last + 1]],
        last + 1,
        origin.as_json(),
        tuple(sorted(found.nonfinite)),
        tuple(dict.fromkeys(notes)),
    )


def _weights_of(model: Module) -> Iterator[tuple[str, Tensor]]:
    yield from Module.named_parameters(model)
    yield from Module.named_buffers(model)


def _call_as_plain(call: ForwardCall, first: int, last: int, notes: list[str]) -> dict[str, Any]:
    copies: dict[int, Tensor] = {}
    random = call.random
    numpy = random.numpy
    if numpy is not None:
        is_usual = numpy[0] == "MT19937"
        numpy = [numpy[0], torch.from_numpy(numpy[1].astype("int64")), *numpy[2:]]
        if not is_usual:
            numpy = None
            notes.append("NumPy's random state is of another generator, and not in the file")
    return {
        "order": call.order,
        "args": [_as_plain(v, f"argument {i}", copies, notes) for i, v in enumerate(call.args)],
        "kwargs": {
            name: _as_plain(v, f"argument {name}", copies, notes) for name, v in call.kwargs.items()
        },
        "requires_grad": [kept.requires_grad for kept in call.inputs],
        "random": {
            "python": random.python,
            "numpy": numpy,
            "host": random.host.clone(),
            "device": None if random.device is None else random.device.cpu().clone(),
        },
        "autocast": [[kind, on, str(dtype)] for kind, on, dtype in call.autocast],
        "cache_enabled": call.cache_enabled,
        "is_training": call.is_training,
        "outputs": [
            [number, kept.path, _plain_tensor(kept.tensor, "an output")]
            for number, kept in call.outputs.items()
            if not kept.change
        ],
        "grads": [
            [g.backward, g.output, _plain_tensor(g.kept.tensor, f"the {g.kept.path}")]
            for g in call.grads
            if first <= g.backward <= last
        ],
    }


def _as_plain(
    value: Any, what: str, copies: dict[int, Tensor], notes: list[str], deep: int = 0
) -> Any:
    """The same of tensors, numbers, texts and plain containers."""
    if issubclass(type(value), torch._C.TensorBase):
        if id(value) not in copies:  # one that is given twice is one
            copies[id(value)] = _plain_tensor(value, what)
        return copies[id(value)]
    if type(value) in PLAIN:
        return value
    if deep >= DEEPEST // 2:
        raise UnsupportedError(f"{what} is nested too deeply")
    if type(value) in (list, tuple, torch.Size):
        items = [_as_plain(v, f"{what}[{i}]", copies, notes, deep + 1) for i, v in enumerate(value)]
        return items if type(value) is list else tuple(items)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        if type(value) not in (dict, OrderedDict):
            notes.append(f"{what}, a {kind}, is a dict in the file")
        if not all(type(key) in (str, int, bool) for key in value):
            raise UnsupportedError(f"{what} has keys that are neither texts nor integers")
        return {
            key: _as_plain(v, f"{what}[{key!r}]", copies, notes, deep + 1)
            for key, v in value.items()
        }
    raise UnsupportedError(
        f"{what} is a {kind}; a file holds tensors, numbers, texts, lists, tuples and dicts"
    )


def _plain_tensor(tensor: Tensor, what: str) -> Tensor:
    """A copy of its own, on the CPU, of the same strides."""
    if hasattr(tensor, "to_local"):
        raise UnsupportedError(f"{what} is sharded (a DTensor, as of FSDP2)")
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
        raise UnsupportedError(f"{what} is a tensor of another layout ({plain.layout})")
    plain = plain.cpu().clone()
    if type(plain) is not Tensor:
        raise UnsupportedError(f"{what} is a tensor of a class of its own, {type(plain).__name__}")
    return plain.resolve_conj().resolve_neg()


def write(path: str | os.PathLike[str], file: PostMortem) -> int:
    """Write it whole or not at all; returns its bytes.

    Raises:
        OSError: a full disk, a folder that is gone.
    """
    path = Path(path)
    content = {spec.name: getattr(file, spec.name) for spec in dataclasses.fields(file)}
    handle, name = tempfile.mkstemp(prefix=".overflow-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            try:
                torch.save({"kind": KIND, "format": FORMAT, **content}, out)
            except RuntimeError as error:  # "unexpected pos", of a write that was cut short
                raise OSError(errno.EIO, "torch could not finish it; is the disk full?") from error
        size = os.path.getsize(name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return size


def read(path: str | os.PathLike[str]) -> PostMortem:
    """Read a file that :func:`write` has written; trusts nothing in it. Tensors on the CPU.

    Raises:
        ConfigError: no such file, none of ours, cut off, of a newer version, or made to harm.
    """
    where = os.fspath(path)
    try:
        if not os.path.isfile(where):
            raise ConfigError(
                f"{where}: no such file; expected one that save_overflow has written."
            )
        with zipfile.ZipFile(where) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:
        raise ConfigError(
            f"{where}: not a file of save_overflow, or cut off: it is no whole zip archive."
        ) from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror or error}).") from None
    if any(e.compress_type for e in entries) or (
        sum(e.file_size for e in entries) > os.path.getsize(where)
    ):
        raise ConfigError(f"{where}: not a file of save_overflow: it says it is larger than it is.")
    try:
        content = torch.load(where, map_location="cpu", weights_only=True)
    except Exception as error:  # torch promises no kind, and tells to trust the file
        raise ConfigError(
            f"{where}: not a file of save_overflow: torch.load(weights_only=True) refuses it "
            f"({type(error).__name__}). It is not read in another way."
        ) from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ConfigError(f"{where}: not a file of save_overflow; it is another file of torch.")
    version = content.get("format")
    if type(version) is not int or version > FORMAT:
        raise ConfigError(
            f"{where}: of format {shown(version)}, the newest that this version knows is {FORMAT}; "
            "upgrade accel_scaler to read it."
        )
    try:
        _check_values(content)
        return _decoded(content)
    except _WrongError as error:
        raise ConfigError(f"{where}: damaged: {error}.") from None


class _WrongError(Exception):
    """What a file holds is not what it should."""


def _check_values(content: Any) -> None:
    """Plain values, of bounded number and depth, and tensors that are as large as they say."""
    seen = 0
    todo: list[tuple[Any, int]] = [(content, 0)]
    while todo:
        value, depth = todo.pop()
        seen += 1
        if seen > MOST_VALUES or depth > DEEPEST:
            raise _WrongError("it holds too much")
        if isinstance(value, Tensor):
            _check_tensor(value)
        elif isinstance(value, dict):
            if not all(type(key) in (str, int, bool) for key in value):
                raise _WrongError("a key that is no text")
            todo += [(each, depth + 1) for each in value.values()]
        elif type(value) in (list, tuple):
            todo += [(each, depth + 1) for each in value]
        elif type(value) not in PLAIN:
            raise _WrongError(f"a {type(value).__name__}")


def _check_tensor(value: Tensor) -> None:
    plain = type(value) is Tensor and value.layout is torch.strided and not value.is_quantized
    if not plain or value.device.type != "cpu" or value.requires_grad or value.is_conj():
        raise _WrongError("a tensor that is not plain")
    # One element of memory may stand for any number, with a stride of 0.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise _WrongError("a tensor that is larger than its memory")


def _decoded(content: dict[str, Any]) -> PostMortem:
    about = _take(content, "about", dict)
    if not all(type(k) is str and type(v) in PLAIN for k, v in about.items()):
        raise _WrongError("about")
    shapes = {}
    for name, each in _take(content, "shapes", dict).items():
        dtype, shape, trains = _items(each, "shapes", str, tuple, bool)
        if type(name) is not str or not all(type(n) is int for n in shape):
            raise _WrongError("shapes")
        shapes[name] = (dtype, shape, trains)
    weights = content.get("weights")
    if weights is not None:
        _all(_take(content, "weights", dict), str, Tensor, "weights")
        found = {name: (str(t.dtype), tuple(t.shape)) for name, t in weights.items()}
        if found != {name: each[:2] for name, each in shapes.items()}:
            raise _WrongError("the weights are not those that it says")
    origin = _take(content, "origin", dict)
    for key in ("where", "module", "class", "text"):
        _take(origin, key, str)
    _take(origin, "micro_batch", int)
    nonfinite, fp32 = _take(content, "nonfinite", tuple), _take(content, "fp32_modules", tuple)
    notes, losses = _take(content, "notes", tuple), _take(content, "losses", list)
    if not all(type(name) is str for name in (*nonfinite, *fp32, *notes)):
        raise _WrongError("a name that is no text")
    if not all(isinstance(loss, Tensor) for loss in losses):
        raise _WrongError("losses")
    backwards = _take(content, "backwards", int)
    if not 0 < backwards <= MOST_VALUES:
        raise _WrongError("backwards")
    calls = _take(content, "calls", list)
    for call in calls:
        _check_call(call, backwards)
    if not calls:
        raise _WrongError("it holds no forward")
    is_training = _all(_take(content, "is_training", dict), str, bool, "is_training")
    model = _take(content, "model", str)
    return PostMortem(
        about, model, is_training, shapes, weights, fp32, calls, losses, backwards, origin,
        nonfinite, notes,
    )  # fmt: skip


def _check_call(call: Any, backwards: int) -> None:
    if type(call) is not dict:
        raise _WrongError("a forward")
    args, kwargs = _take(call, "args", list), _take(call, "kwargs", dict)
    if not all(type(name) is str for name in kwargs):
        raise _WrongError("an argument's name")
    requires = _take(call, "requires_grad", list)
    count = sum(1 for _ in tensors_in({**dict(enumerate(args)), **kwargs}))
    if len(requires) != count or not all(type(each) is bool for each in requires):
        raise _WrongError("requires_grad")
    _take(call, "order", int)
    _take(call, "cache_enabled", bool)
    _take(call, "is_training", bool)
    for each in _take(call, "autocast", list):
        kind, _, dtype = _items(each, "autocast", str, bool, str)
        if not kind.isalnum() or dtype not in ("torch.float16", "torch.bfloat16", "torch.float32"):
            raise _WrongError("autocast")
    for each in _take(call, "outputs", list):
        _items(each, "outputs", int, str, Tensor)
    for each in _take(call, "grads", list):
        backward, output, _ = _items(each, "grads", int, int, Tensor)
        if not 0 <= backward < backwards or output < 0:
            raise _WrongError("the number of a gradient")
    random = _take(call, "random", dict)
    _take(random, "python", tuple)
    for key in ("host", "device"):
        state = random.get(key)
        if state is not None and not (isinstance(state, Tensor) and state.dtype is torch.uint8):
            raise _WrongError("random state")
    numpy = random.get("numpy")
    if numpy is not None:
        _, keys, *_ = _items(numpy, "random state", str, Tensor, int, int, float)
        if keys.shape != (624,) or keys.dtype is not torch.int64:
            raise _WrongError("random state")


def _take(content: dict[Any, Any], key: str, kind: type[T]) -> T:
    value = content.get(key)
    if type(value) is not kind:
        raise _WrongError(f"{key} is {shown(value)[:80]}")
    return value


def _items(value: Any, what: str, *kinds: type) -> Any:
    same = type(value) in (list, tuple) and len(value) == len(kinds)
    if not same or not all(type(v) is kind for v, kind in zip(value, kinds, strict=True)):
        raise _WrongError(what)
    return value


def _all(value: dict[Any, Any], key: type, kind: type, what: str) -> Any:
    if not all(type(k) is key and type(v) is kind for k, v in value.items()):
        raise _WrongError(what)
    return value


def recorded(file: PostMortem, model: Module) -> WindowRecording:
    """The window as it was recorded, to be run again; ``close()`` removes its hooks.

    Args:
        model: which is in the modes and has the weights of that time; inputs are taken to its
            device.

    Raises:
        ConfigError: a random state that this torch, or Python, does not take.
    """
    recording = WindowRecording()
    recording.watch(model, model)
    (entry,) = recording.models
    there: dict[int, Tensor] = {}

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in there:
                there[id(value)] = value.to(entry.device)
            return there[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(map(place, value))
        return {k: place(v) for k, v in value.items()} if isinstance(value, dict) else value

    before = RandomState.now(entry.device)
    try:
        for each in file.calls:
            args, kwargs = tuple(place(each["args"])), place(each["kwargs"])
            found = tensors_in({**dict(enumerate(args)), **kwargs})
            inputs = [
                dataclasses.replace(Kept.of(path, tensor), requires_grad=requires)
                for (path, tensor), requires in zip(found, each["requires_grad"], strict=True)
            ]
            random = _random_of(each["random"], entry.device)
            random.put_back()
            autocast = [(kind, on, getattr(torch, name[6:])) for kind, on, name in each["autocast"]]
            call = ForwardCall(
                entry, each["order"], args, kwargs, inputs, random, tuple(autocast),
                each["cache_enabled"], each["is_training"],
            )  # fmt: skip
            for number, path, tensor in each["outputs"]:
                call.outputs[number] = Kept.of(path, place(tensor))
            for backward, number, tensor in each["grads"]:
                kept = Kept.of(f"gradient of output {number}", place(tensor))
                call.grads.append(OutputGradient(backward, number, kept, False))
            recording.calls.append(call)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        recording.close()
        raise ConfigError(f"the random state in the file cannot be set: {error}") from None
    finally:
        before.put_back()
    recording.losses = [Kept.of("loss", place(loss)) for loss in file.losses]
    recording.backwards = file.backwards
    return recording


def _random_of(state: dict[str, Any], device: torch.device) -> RandomState:
    numpy = state["numpy"]
    if numpy is not None:
        numpy = (numpy[0], numpy[1].numpy().astype("uint32"), *numpy[2:])
    mine = RandomState.now(device)
    other = state["device"] if mine.device is not None else None
    return RandomState(state["python"], numpy, state["host"], other, device)
