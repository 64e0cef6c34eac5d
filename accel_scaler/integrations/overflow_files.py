"""``save_overflow``: the first window of a run of skips, in a file for ``accel-scaler replay``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, SyncBatchNorm

from ..errors import ConfigError, UnsupportedError
from ..overflow_finder import Replay, WindowRecording, capture, surroundings, write
from ..places import why_no_folder
from ..precision import ChosenModules, named
from ..scaling import Window

logger = logging.getLogger("accel_scaler")

MOST_FILES = 5
"""Of one run, on one rank."""


def refuse_unwritable_folder(folder: str) -> None:
    """Find out whether :class:`OverflowFiles` could write there, and make nothing.

    Raises:
        ConfigError: it could not.
    """
    if (why := why_no_folder(folder)) is not None:
        raise _unwritable(folder, why)


def _unwritable(folder: str, why: str) -> ConfigError:
    return ConfigError(
        f"save_overflow={folder!r} cannot be written to ({why}); expected a folder, or a place for "
        "one."
    )


class OverflowFiles:
    """Writes them. Never ends a training run: what fails later is a warning, once.

    Args:
        folder: made if it is not there.
        facts: plain values about the run; ``rank`` is one.
        chosen: the modules that run in float32.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: str, facts: Mapping[str, Any], chosen: ChosenModules) -> None:
        self.folder = Path(folder).expanduser()
        self.facts, self.chosen = dict(facts), chosen
        self._written = 0
        self._told: set[str] = set()
        refuse_unwritable_folder(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error.strerror or str(error)) from None

    def save(self, recording: WindowRecording, found: Replay, window: Window, scale: float) -> None:
        """Write the micro-batch of the window in which it overflowed.

        Synchronises with the device, and holds the weights in host memory once more.

        Args:
            recording: which was run again just now, on this rank.
            found: what that has shown, an origin.
            window: parameters and gradients are still those of it.
            scale: of its losses.
        """
        if self._written >= MOST_FILES:
            return
        model, device = recording.calls[0].model.module(), recording.calls[0].model.device
        about = {
            **self.facts,
            **surroundings(device),
            "window": window.index,
            "scale": float(scale),
        }
        try:
            _refuse_joint_statistics(model)
            size = self._write(capture(recording, found, about, self._in_fp32(model)), window)
        except UnsupportedError as error:
            self.refuse(str(error))
        except Exception as error:  # a full disk, no memory for a copy; it is told
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._tell(f"save_overflow={str(self.folder)!r}: no file was written ({why})", "write")
        else:
            path, bytes_ = size
            self._written += 1
            last = f" It is the last of {MOST_FILES}." if self._written == MOST_FILES else ""
            logger.warning(
                "window %d: saved in %s (%.3g MB: its batch and the weights, as they are; mind "
                "who gets it). To run it again: accel-scaler replay %s --model FILE.py:FUNCTION, "
                "a function that returns the model.%s",
                window.index,
                path,
                bytes_ / 1e6,
                path,
                last,
            )

    def refuse(self, why: str) -> None:
        """Tell, once for each reason, that there is no file."""
        self._tell(f"the window that overflowed is not saved: {why}.")

    def _write(self, file: Any, window: Window) -> tuple[Path, int]:
        name = f"overflow-{window.index:06d}-rank{self.facts.get('rank', 0)}"
        path, number = self.folder / f"{name}.pt", 1
        while path.exists():  # of a run before this one
            number += 1
            path = self.folder / f"{name}-{number}.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        return path, write(path, file)

    def _in_fp32(self, model: Module | None) -> tuple[str, ...]:
        chosen = self.chosen.modules
        found = {} if model is None else named(model)
        return tuple(n for n, module in found.items() if any(module is each for each in chosen))

    def _tell(self, text: str, kind: str = "") -> None:
        """Once for each kind, or each text."""
        if (kind or text) not in self._told:
            self._told.add(kind or text)
            logger.warning("%s", text)


def _refuse_joint_statistics(model: Module | None) -> None:
    joint = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    for name, module in [] if model is None else model.named_modules():
        if joint and isinstance(module, SyncBatchNorm):
            raise UnsupportedError(f"{name} (SyncBatchNorm) takes the batches of all ranks")
