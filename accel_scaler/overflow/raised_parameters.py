"""A module's float16 and bfloat16 parameters and buffers: in float32 for one call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from .casts import LOW


class Change(NamedTuple):
    """One tensor of a module, replaced for a call."""

    owner: Module
    where: dict[str, Any]
    """The owner's parameters, buffers, or attributes."""
    name: str
    tensor: Tensor
    """What was there."""
    cast: Tensor


def raise_parameters(module: Module) -> list[Change]:
    """Put float32 casts in the place of float16 and bfloat16 parameters, buffers.

    autograd sees the cast: gradients flow to the parameters, in their dtype. A tensor that two
    modules have is cast once. Those of modules in it that FSDP2 gathers are not touched: they are
    there within those modules' own calls alone.

    Returns what :func:`restore` needs; empty where all are in another dtype.
    """
    changes: list[Change] = []
    casts: dict[int, Tensor] = {}
    for owner in _owners(module):
        if not _is_low(owner):
            continue
        for where, name, tensor in _tensors_of(owner):
            if tensor.dtype in LOW:
                if id(tensor) not in casts:
                    casts[id(tensor)] = tensor.to(torch.float32)
                changes.append(Change(owner, where, name, tensor, casts[id(tensor)]))
    for owner, where, name, _, cast in changes:
        where[name] = cast
        _tell(owner)
    return changes


def restore(changes: list[Change]) -> None:
    """The tensors of before, with what the call has written to those that are no parameters."""
    for owner, where, name, tensor, cast in changes:
        now = where.get(name)
        if now is cast:
            if where is not owner._parameters and not cast.requires_grad:
                _write(tensor, cast)
            where[name] = tensor
            _tell(owner)
        elif isinstance(now, Tensor) and now.dtype is torch.float32:  # replaced in the call
            where[name] = now.to(tensor.dtype)


def needs_parts(module: Module) -> bool:
    """A module in it, called by itself, may find its parameters in float16."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and (tensor.dtype in LOW or hasattr(tensor, "to_local")):
            return True
    return any(needs_parts(each) for each in module._modules.values() if each is not None)


def is_gathered(module: Module) -> bool:
    """FSDP2 shards it, by itself or as one of a group."""
    # To import it takes a second; who has such a module has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _owners(module: Module) -> list[Module]:
    """It and those in it, but for what is gathered by itself."""
    found = [module]
    for owner in found:
        for child in owner._modules.values():
            if child is not None and not is_gathered(child):
                found.append(child)
    return found


def _is_low(owner: Module) -> bool:
    """Whether :func:`_tensors_of` gives any; asked of every module, in every call."""
    for parameter in owner._parameters.values():
        if parameter is not None and parameter.dtype in LOW:
            return True
    for buffer in owner._buffers.values():
        if buffer is not None and buffer.dtype in LOW:
            return True
    if torch.compiler.is_compiling():
        return False
    return any(type(value) is Tensor and value.dtype in LOW for value in vars(owner).values())


def _tensors_of(owner: Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Parameters and buffers, and what a hook, as of weight norm, or FSDP1 leaves among its
    attributes; no compiler goes through their names.

    A parameter whose update is on its way is not asked whether it is a tensor: it would wait.
    """
    places: list[dict[str, Any]] = [owner._parameters, owner._buffers]
    for where in places:
        for name, tensor in where.items():
            if tensor is not None:
                yield where, name, tensor
    if not torch.compiler.is_compiling():
        for name, value in vars(owner).items():
            if type(value) is Tensor:
                yield vars(owner), name, value


def _tell(owner: Module) -> None:
    """A recurrent layer keeps its weights in a list beside."""
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights = [getattr(owner, name, None) for name in owner._flat_weights_names]


@torch.no_grad()
def _write(buffer: Tensor, cast: Tensor) -> None:
    """Unchanged or not: batch norm writes without a word to the version counter, and who has saved
    the buffer for a backward must not find that changed where nothing was."""
    if 0 not in buffer.stride():  # one that is expanded cannot be written to
        (buffer if torch.compiler.is_compiling() else buffer.data).copy_(cast)
