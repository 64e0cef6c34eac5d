"""Modules under the names that their own model gives them, whoever has wrapped it since."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Module

from ..errors import ConfigError, shown

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Where torch keeps a module in the one that it wraps around it: no part of a name."""
PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
MOST_NEAR = 3


def named(model: Module) -> dict[str, Module]:
    """The modules of a model by name, in the order of ``named_modules()``; "" is the model itself.

    Names and modules are those of the model within DDP, ``torch.compile`` and checkpoint wrappers.
    A module that is used twice has two names. No synchronisation with the device.
    """
    found: dict[str, Module] = {}
    for name, module in _walk(model, "", ()):
        found.setdefault(name, module)
    return found


def match(model: Module, patterns: Iterable[str]) -> list[str]:
    """Names of the modules that the globs match, in the order of the model; each module once.

    A glob is Python's ``fnmatch``: ``*`` stands for dots too, a capital letter is one. It never
    matches the model itself. A list of modules, which has no forward, stands for those in it.

    Args:
        model: wrapped or not.

    Returns the names; none where nothing matches: see :func:`refuse_unmatched`.
    """
    globs = tuple(patterns)
    wanted: dict[int, str] = {}
    lists: set[str] = set()
    for name, module in named(model).items():
        is_meant = name.rpartition(".")[0] in lists or any(fnmatchcase(name, g) for g in globs)
        if not name or not is_meant:
            continue
        if has_forward(module):
            wanted.setdefault(id(module), name)
        else:
            lists.add(name)
    return list(wanted.values())


def refuse_unmatched(models: Sequence[Module], patterns: Iterable[str]) -> None:
    """Raise ``ConfigError`` for the first glob that matches in none of the models.

    It names the nearest module names.
    """
    names: list[str] | None = None
    for pattern in patterns:
        if any(match(model, [pattern]) for model in models):
            continue
        if names is None:
            names = list(dict.fromkeys(n for model in models for n in named(model) if n))
        near = _nearest(pattern, names)
        if not models:
            why = "no model is prepared"
        elif near:
            why = f"the nearest names are {', '.join(map(repr, near))}"
        else:
            why = "no name is near it"
        raise ConfigError(
            f"fp32_modules: {shown(pattern)} matches no module: {why}. It is a glob on the names "
            "of model.named_modules(), as '*.wo' or 'transformer.h.3.mlp'."
        )


def has_forward(module: Module) -> bool:
    """False of a list of modules, which only holds them."""
    return getattr(module.forward, "__func__", None) is not Module.forward


def with_forward(module: Module) -> Iterator[Module]:
    """The module; where it only holds others, those."""
    if has_forward(module):
        yield module
    else:
        for each in module.children():
            yield from with_forward(each)


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """Whole names first; then those whose last part is near the last part of the pattern."""
    near = difflib.get_close_matches(pattern[:200], names, n=MOST_NEAR)
    tail = pattern.rpartition(".")[2].strip("*?")
    if len(near) < MOST_NEAR and tail:
        ends: dict[str, str] = {}
        for name in names:
            ends.setdefault(name.rpartition(".")[2], name)
        near += [ends[end] for end in difflib.get_close_matches(tail[:200], ends, n=MOST_NEAR)]
    return list(dict.fromkeys(near))[:MOST_NEAR]


def _walk(module: Module, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Module]]:
    if id(module) in above:  # it holds one of those that it is in
        return
    above = (*above, id(module))
    inner = _within(module)
    if inner is not None:
        yield from _walk(inner, name, above)
        return
    yield name, module
    for child, each in module._modules.items():
        if each is not None:
            yield from _walk(each, f"{name}.{child}" if name else child, above)


def _within(module: Module) -> Module | None:
    """What DDP, a compiler or a checkpoint is wrapped around."""
    if isinstance(module, PARALLEL):
        inner: Module = module.module
        return inner
    return next((module._modules[key] for key in WRAPPED if key in module._modules), None)
