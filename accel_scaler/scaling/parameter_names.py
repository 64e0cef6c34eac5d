"""Parameters under the names that their modules give them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

MAX_NAMES = 5
"""Parameters that an error names one by one."""


class ParameterNames:
    """Names parameters. It holds the modules weakly."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each module that is added."""
        self._modules: list[weakref.ref[Module]] = []

    def add_module(self, module: Module) -> None:
        """Take parameter names from this module."""
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))
            self.version += 1

    def parameters(self) -> list[Tensor]:
        """The parameters of all modules, each once, but no lazy ones before their first forward."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        found = {id(p): p for module in modules for p in module.parameters() if not is_lazy(p)}
        return list(found.values())

    def of(self, params: Iterable[Tensor], optimizer: Optimizer | None = None) -> list[str]:
        """A name for each parameter, once: from its module or optimizer, else place and shape."""
        if not (wanted := {id(p): p for p in params}):
            return []
        found = self.by_id()
        for number, group in enumerate(optimizer.param_groups if optimizer else []):
            labels = group.get("param_names")
            for place, p in enumerate(group["params"]):
                if id(p) in wanted and id(p) not in found:
                    unnamed = f"parameter {place} of group {number}, shape {tuple(p.shape)}"
                    found[id(p)] = labels[place] if labels else unnamed
        return [
            found.get(key, f"a parameter of shape {tuple(p.shape)}") for key, p in wanted.items()
        ]

    def by_id(self) -> dict[int, str]:
        """``id(parameter)`` -> name, in the order of the modules. A name that two modules have gets
        the class and the number of its module before it."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        named = [list(module.named_parameters()) for module in modules]
        uses = Counter(name for each in named for name, _ in each)
        found: dict[int, str] = {}
        for number, (module, each) in enumerate(zip(modules, named, strict=True)):
            label = f"{type(module).__name__}[{number}]"
            for name, p in each:
                found.setdefault(id(p), name if uses[name] == 1 else f"{label}.{name}")
        return found
