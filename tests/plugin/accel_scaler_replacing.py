"""Puts ``accel_scaler`` in the place of the stock scaler, for a process, and takes it out again.

One function is changed in each of three classes, ``__init__``: that of ``torch.amp.GradScaler``
makes the object an ``accel_scaler.GradScaler`` and goes on there; of ``accelerate.Accelerator``
and ``transformers.Trainer`` end with ``attach``. The names stay bound to the stock classes, so it
does not matter who imported which of them when, a subclass is reached through ``super()``, and
``isinstance`` needs no help: ours are subclasses of torch's.

A class is changed once its module is imported, by the finder of ``accel-scaler launch``; until
then nothing is imported. Standard library only: it runs as Python starts, in every child process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["VARIABLE", "Replacement", "current", "start_from_environment"]

VARIABLE = "PYTEST_WITH_ACCEL_SCALER"
"""What a child process must know, as JSON: the arguments of :class:`Replacement`."""

CLASSES = {
    "torch.amp.grad_scaler": "GradScaler",
    "accelerate.accelerator": "Accelerator",
    "transformers.trainer": "Trainer",
}
"""The modules to change, and the class in each."""

SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"
"""Its scaler overrides torch's internals for FSDP1: left alone, unless an Accelerator has it."""

_current: Replacement | None = None


class Replacement:
    """The changes of one process.

    Args:
        startup: the folder of ``accel_scaler``'s own ``sitecustomize``.
        tally: a file to which each event of this and of child processes is appended, one a line.
    """

    def __init__(self, startup: str, tally: str) -> None:
        self.startup, self.tally = startup, tally
        self.active = False
        self._changed: list[tuple[Any, Any, Any]] = []
        self._meets = {
            "GradScaler": self._scaler_init,
            "Accelerator": self._followed_by(self._meet_accelerator),
            "Trainer": self._followed_by(self._meet_trainer),
        }
        self._hook: Any = _load(Path(startup) / "sitecustomize.py", "_accel_scaler_startup")
        self._hook.CLASSES = CLASSES
        self._hook.change = self._change
        self._finder = self._hook.Finder()

    def install(self) -> None:
        """Change the classes that are there, and wait for the others."""
        global _current
        if _current is not None:
            raise RuntimeError("a replacement is installed already; undo() it first.")
        _current, self.active = self, True
        for name in CLASSES:
            if name in sys.modules:
                self._change(sys.modules[name], name)
        sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Put everything back. Objects made meanwhile stay what they are."""
        global _current
        _current, self.active = None, False
        sys.meta_path.remove(self._finder)
        for cls, stock, changed in reversed(self._changed):
            # Where somebody has wrapped ours since, it stays inside, and does nothing any more.
            if cls.__dict__.get("__init__") is changed:
                cls.__init__ = stock
        self._changed.clear()

    def to_environment(self) -> str:
        """The value of ``VARIABLE`` for child processes."""
        return json.dumps({"startup": self.startup, "tally": self.tally})

    def note(self, event: str) -> None:
        """Append a line to the tally; a process that outlives the test run has nobody to tell."""
        if os.path.exists(self.tally):
            descriptor = os.open(self.tally, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, event.encode() + b"\n")
            finally:
                os.close(descriptor)

    def counts(self) -> Counter[str]:
        """How often each event was noted, by all processes."""
        return Counter(Path(self.tally).read_text(encoding="utf-8").splitlines())

    def _change(self, module: ModuleType, name: str) -> None:
        cls = getattr(module, CLASSES[name])
        stock = cls.__init__
        if self.active:  # undone before the import was through
            cls.__init__ = changed = self._meets[cls.__name__](stock)
            self._changed.append((cls, stock, changed))

    def _package(self) -> ModuleType:
        """``accel_scaler``; of the installation that runs the tests where a child has none."""
        self._hook.load_hook()
        return sys.modules["accel_scaler"]

    def _scaler_init(self, stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            ours = self._package().GradScaler if self.active else None
            if ours is None or isinstance(scaler, ours):  # on its way up through super()
                stock(scaler, *args, **kwargs)
            elif any(cls.__module__ == SHARDED for cls in type(scaler).__mro__):
                stock(scaler, *args, **kwargs)
                self.note("sharded")
            else:
                scaler.__class__ = _ours_of(type(scaler), ours)
                if not args:
                    kwargs.setdefault("device", "cuda")  # the stock default
                ours.__init__(scaler, *args, **kwargs)
                self.note("scaler")

        return __init__

    def _followed_by(self, meet: Callable[[Any], None]) -> Callable[..., Callable[..., None]]:
        def follow(stock: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(stock)
            def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                stock(made, *args, **kwargs)
                if self.active:
                    meet(made)

            return __init__

        return follow

    def _meet_accelerator(self, accelerator: Any) -> None:
        if accelerator.mixed_precision != "fp16":
            self.note("unscaled")
            return
        package = self._package()
        if isinstance(accelerator, package.ScaledAccelerator):  # the test makes it one by itself
            return
        try:
            self._hook.load_hook().attach_accelerator(accelerator)
        except package.UnsupportedError as error:  # DeepSpeed and others scale by themselves
            self.note(f"refused: {str(error).splitlines()[0]}")
        else:
            self.note("accelerator")

    def _meet_trainer(self, trainer: Any) -> None:
        if isinstance(trainer.accelerator, self._package().ScaledAccelerator):
            self._hook.load_hook().attach_trainer(trainer)
            self.note("trainer")


def current() -> Replacement | None:
    """What is installed in this process."""
    return _current


def start_from_environment() -> None:
    """Install what the process that runs the tests has installed."""
    Replacement(**json.loads(os.environ[VARIABLE])).install()


@functools.cache
def _ours_of(cls: Any, ours: Any) -> Any:
    """``ours`` for torch's own class; for a subclass, it on top of ours.

    So a subclass keeps its methods and its arguments (``torch.cuda.amp``'s takes no device), and
    what it calls through ``super()`` is ours.
    """
    if cls is _stock():
        return ours
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": _reduce,
    }
    return type(cls.__name__, (cls, ours), body)


def _stock() -> Any:
    return sys.modules["torch.amp.grad_scaler"].GradScaler


def _reduce(scaler: Any, protocol: Any) -> Any:
    """Pickle under the name of the class that a user knows; the other cannot be found by name."""
    return _restore, (type(scaler).__bases__[0],), scaler.__getstate__()


def _restore(cls: Any) -> Any:
    """An empty scaler for unpickling; ours, also where nothing is replaced."""
    import accel_scaler

    made = _ours_of(cls, accel_scaler.GradScaler)
    return made.__new__(made)


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} of accel_scaler cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
