"""What bitsandbytes' optimizers know of parameters beside their groups and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_MANAGERS = {
    "bitsandbytes.optim.optimizer.GlobalOptimManager",
    "bitsandbytes.functional.GlobalPageManager",
}
_ARGUMENTS = "bitsandbytes.optim.optimizer.MockArgs"


def plain_settings(optimizer: Optimizer, key: str, value: Any) -> Any:
    """What an attribute of one of its optimizers amounts to; anything else as it is.

    Overrides of single parameters, by their ``id``, are followed (:func:`overrides_on`), what the
    page manager lists is state, and ``name2qmap`` has the tables that state is read with. The rest
    is a bag of settings.
    """
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _MANAGERS or (key == "name2qmap" and _manager_of(optimizer) is not None):
        return None
    return vars(value) if name == _ARGUMENTS else value


def _manager_of(optimizer: Optimizer) -> Any:
    manager = getattr(optimizer, "mng", None)
    cls = type(manager)
    return manager if f"{cls.__module__}.{cls.__qualname__}" in _MANAGERS else None


def chosen_keys(optimizer: Optimizer) -> frozenset[str]:
    """Keys of state whose dtype is the optimizer's own choice, never the parameter's."""
    return frozenset(getattr(optimizer, "non_castable_tensor_keys", ()))


@contextmanager
def overrides_on(optimizer: Any, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
    """In the block ``GlobalOptimManager``'s overrides of parameters are those of what is stepped.

    Args:
        stand_ins: what is stepped, by the ``id`` of the parameter.
    """
    manager = _manager_of(optimizer)
    if manager is None:
        yield
        return
    if not optimizer.initialized:  # else its first step looks for modules' own parameters
        optimizer.check_overrides()
    known = manager.pid2config
    added = {id(p): known[key] for key, p in stand_ins.items() if key in known}
    known.update(added)
    try:
        yield
    finally:
        for key in added:
            known.pop(key, None)
