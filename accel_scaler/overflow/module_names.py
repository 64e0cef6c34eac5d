"""Names of modules, and globs on them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch.nn import Module

from ..errors import ConfigError, shown
from ..models import unwrap

WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Attributes in which torch's wrappers keep a module: not part of its name."""


def plain_name(name: str) -> str:
    """A name of ``named_modules()`` without the parts that are due to wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def modules_by_name(model: Module) -> dict[str, Module]:
    """The modules in the order of ``named_modules()``; "" is the model itself.

    Names and modules are the inner ones of DDP, ``torch.compile``, FSDP1 and checkpoint wrappers.
    """
    # A wrapper comes before the module in it, which takes its place here.
    return {plain_name(name): module for name, module in unwrap(model).named_modules()}


def has_forward(module: Module) -> bool:
    """False for a list or a dict of modules."""
    return getattr(module.forward, "__func__", None) is not Module.forward


def match(model: Module, globs: Iterable[str]) -> list[str]:
    """Names of the modules with a forward that the globs match, in the order of the model.

    A glob is Python's ``fnmatch``, case-sensitive; ``*`` matches dots too. It never matches the
    model itself.
    """
    globs, modules = tuple(globs), modules_by_name(model)
    names = [name for name in modules if name and has_forward(modules[name])]
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def refuse_unmatched(models: Sequence[Module], globs: Iterable[str]) -> None:
    """Raise ``ConfigError`` for the first glob that matches no module of any model."""
    for glob in globs:
        if any(match(model, [glob]) for model in models):
            continue
        names = [name for model in models for name in modules_by_name(model) if name]
        # Whole names that are near, then those whose last part is near the glob's last part.
        last = glob.rpartition(".")[2].strip("*?")[:200]
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        near = difflib.get_close_matches(glob[:200], names)
        near += [by_last[part] for part in difflib.get_close_matches(last, by_last)]
        nearest = list(dict.fromkeys(near))[:3]
        why = f"the nearest names are {', '.join(map(repr, nearest))}"
        if not nearest:
            why = "no name is near it" if models else "no model is prepared"
        raise ConfigError(
            f"fp32_modules: {shown(glob)} matches no module: {why}. Expected a glob on the names "
            "of model.named_modules() that have a forward, as '*.wo' or 'transformer.h.3.mlp'."
        )
