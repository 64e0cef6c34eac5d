"""Python runs this as it starts, in every process of a job under ``accel-scaler launch``.

The launcher puts this folder, and nothing else, in front of PYTHONPATH. Starting the script from a
module of our own (runpy) would be the other way; it changes ``__main__``, ``__spec__``, tracebacks
and what ``multiprocessing`` spawns, needs one form each for a script, ``-m``, standard input and an
executable, and does not reach a Python that a shell script starts. This changes none of these.

When ``accelerate.accelerator`` and ``transformers.trainer`` have been imported, the ``__init__`` of
their class is followed by ``attach``. Until then nothing is imported, and a process that uses
neither is left alone. It must run on any Python that the script starts, so it stays with the
standard library. Not reached: ``python -I``, ``-E`` and ``-S``, which ignore PYTHONPATH or site.
"""

from __future__ import annotations

import _thread
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))

CLASSES = {
    "accelerate.accelerator": ("Accelerator", "meet_accelerator"),
    "transformers.trainer": ("Trainer", "meet_trainer"),
}
"""Module: the class in it, and the function of ``attach_hook`` that meets an instance."""


class Finder:
    """Finds the modules of ``CLASSES`` where they are, and follows their execution."""

    def __init__(self) -> None:
        self._asking: set[tuple[int, str]] = set()
        """Thread and module: another hook may ask everybody too, and so ask this one again."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        key = _thread.get_ident(), name
        if name not in CLASSES or key in self._asking:
            return None
        self._asking.add(key)
        try:
            finders = list(sys.meta_path)
            if self in finders:  # those in front have been asked, or are asking now
                del finders[: finders.index(self) + 1]
            for finder in finders:
                spec = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    follow(spec.loader, name)
                    return spec
        finally:
            self._asking.discard(key)
        return None


def follow(loader: Any, name: str) -> None:
    """Let ``loader`` change the class once it has executed the module; it is as before then."""
    execute = loader.exec_module
    before = vars(loader).get("exec_module")

    def exec_module(module: Any) -> None:
        if vars(loader).get("exec_module") is exec_module:  # nobody follows it after us
            if before is None:
                del loader.exec_module
            else:
                loader.exec_module = before
        execute(module)
        change(module, name)

    loader.exec_module = exec_module


def change(module: Any, name: str) -> None:
    """Let the class's ``__init__`` end with a call of ``accel_scaler.launch.attach_hook``."""
    import functools

    class_name, meet = CLASSES[name]
    cls = getattr(module, class_name)
    stock = cls.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        stock(self, *args, **kwargs)
        getattr(launched(), meet)(self)

    cls.__init__ = __init__


def launched() -> Any:
    """``attach_hook``, of this installation where the process would find none."""
    import importlib.util

    if importlib.util.find_spec("accel_scaler") is None:
        package = os.path.dirname(os.path.dirname(HERE))
        spec: Any = importlib.util.spec_from_file_location(
            "accel_scaler",
            os.path.join(package, "__init__.py"),
            submodule_search_locations=[package],
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["accel_scaler"] = module
        spec.loader.exec_module(module)
    return importlib.import_module("accel_scaler.launch.attach_hook")


def run_the_next() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    import importlib.util

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def start() -> None:
    """Leave ``sys.path`` as it would be, watch for the modules, make way for the next."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    for name in CLASSES:
        if name in sys.modules:  # imported by a .pth file
            change(sys.modules[name], name)
    sys.meta_path.insert(0, Finder())
    run_the_next()


if __name__ == "sitecustomize":
    start()
