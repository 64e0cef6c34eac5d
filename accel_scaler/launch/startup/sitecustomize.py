"""Python runs this module at its start, in every process of a job under ``accel-scaler launch``.

The launcher puts this folder in front of PYTHONPATH. A start through a module of our own (runpy)
would change ``__main__``, ``__spec__``, tracebacks and the children of ``multiprocessing``, and
miss a Python that a shell script starts.

After an import of ``accelerate.accelerator`` or ``transformers.trainer`` the ``__init__`` of its
class ends with a call of ``attach_hook``; before it only the standard library is imported, since
any Python of the job runs this. ``python -I``, ``-E`` and ``-S`` pass over PYTHONPATH or site.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))

CLASSES = {
    "accelerate.accelerator": ("Accelerator", "attach_accelerator"),
    "transformers.trainer": ("Trainer", "attach_trainer"),
}
"""For each module its class, and the function of ``attach_hook`` for an instance."""


class Finder:
    """Finds the modules of ``CLASSES`` on the path, and changes them after their execution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path, target) if name in CLASSES else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module  # the loader's own again
            execute(module)
            change(module, name)

        loader.exec_module = exec_module
        return spec


def change(module: Any, name: str) -> None:
    """Let the ``__init__`` of the class end with a call of ``attach_hook``."""
    import functools

    class_name, hook = CLASSES[name]
    cls = getattr(module, class_name)
    stock = cls.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        stock(self, *args, **kwargs)
        getattr(load_hook(), hook)(self)

    cls.__init__ = __init__


def load_hook() -> Any:
    """``attach_hook``, from this installation where the process finds no other."""
    import importlib.util

    if importlib.util.find_spec("accel_scaler") is None:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
    return importlib.import_module("accel_scaler.launch.attach_hook")


def run_hidden() -> None:
    """Run another ``sitecustomize``, which this one hides."""
    import importlib.util

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    sys.meta_path.insert(0, Finder())
    run_hidden()
