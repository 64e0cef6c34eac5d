"""Checkpoint folders: one that is being written, or whose writer was ended, is known as such.

``Accelerator.save_state`` writes file after file. A process that is killed in between leaves a
folder that stock ``load_state`` may take: the last file, the random numbers, is allowed to be
missing or cut off, and where an older checkpoint was overwritten every file is there, some old and
some new. So a file, ``INCOMPLETE.<rank>``, stands in the folder while it is written and is removed
at the very end. A complete checkpoint is what stock makes, no file more.

A Trainer writes ``trainer_state.json`` last, apart from deleting older checkpoints: a folder is
complete once that is there, and where one is written over, the old one is removed first.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError

logger = logging.getLogger("accel_scaler")

MARK = "INCOMPLETE"
"""Name, before a dot and the rank, of the file that stands in an incomplete checkpoint."""

TRAINER_STATE = "trainer_state.json"

TEXT = (
    "accel_scaler is writing this checkpoint, or was ended while it did: then the files here do "
    "not belong together, and load_state refuses them.\n"
)


@contextmanager
def saving(accelerator: Any, folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Around ``save_state(folder)``: the folder counts as complete once the block has ended.

    If it ends with an exception the folder stays marked, and a line in the log says so. Saving
    into the same folder again mends it.

    Raises:
        OSError: a file is cut off; older torch (2.6) says nothing of a disk that is full.
    """
    marks: list[Path] = []

    def mark(models: Any, weights: Any, where: str | os.PathLike[str]) -> None:
        if not marks:
            marks.append(Path(where) / f"{MARK}.{accelerator.process_index}")
            _put_mark(marks[0], accelerator)

    handle = accelerator.register_save_state_pre_hook(mark)
    try:
        if folder is not None and not accelerator.project_configuration.automatic_checkpoint_naming:
            mark(None, None, folder)  # before the first of its files is touched
        yield
        for path in marks:
            _check_whole(path.parent, accelerator)
    except BaseException as error:
        if marks:
            _tell_unfinished(marks[0].parent, error)
        raise
    finally:
        handle.remove()
    for path in marks:
        path.unlink(missing_ok=True)


@contextmanager
def loading(accelerator: Any, folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Around ``load_state(folder)``: raises before anything is loaded from an incomplete one.

    Raises:
        ConfigError: see :func:`check_complete`.
    """
    rank = accelerator.process_index

    def check(models: Any, where: str | os.PathLike[str]) -> None:
        check_complete(Path(where), rank)

    if folder is not None:
        check(None, os.path.expanduser(folder))
        yield
        return
    handle = accelerator.register_load_state_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def check_complete(folder: Path, rank: int) -> None:
    """Refuse a checkpoint whose writer was ended; warn where its random numbers are missing.

    Raises:
        ConfigError: a mark stands in ``folder``, it is empty, or this rank's random numbers are
            cut off.
    """
    marks = sorted(folder.glob(f"{MARK}.*"))
    if marks:
        raise ConfigError(
            f"load_state: {str(folder)!r} is not a complete checkpoint: {marks[0].name} stands in "
            "it, so save_state is still writing it, or was ended while it did. Load an earlier "
            "one."
        )
    if folder.is_dir() and not any(folder.iterdir()):
        raise ConfigError(
            f"load_state: {str(folder)!r} is empty: the process was ended as it began to save "
            "this checkpoint. Load an earlier one."
        )
    numbers = folder / f"random_states_{rank}.pkl"
    if not numbers.exists():
        if folder.is_dir():
            logger.warning(
                f"load_state: {str(folder)!r} has no {numbers.name}, so random numbers (dropout, "
                f"shuffling) go on from where they are now on rank {rank}. Right for more ranks "
                "than were saved; else the checkpoint is not complete."
            )
    elif not _is_whole(numbers):
        raise ConfigError(
            f"load_state: {str(numbers)!r} is cut off ({numbers.stat().st_size} bytes): the "
            "process was ended while it saved this checkpoint. Load an earlier one."
        )


@contextmanager
def saving_trainer(folder: Path, is_main: bool) -> Iterator[None]:
    """Around a Trainer's saving to ``folder``: see :func:`check_trainer_folder`."""
    state = folder / TRAINER_STATE
    if is_main:
        state.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        if is_main and not state.exists():
            _tell_unfinished(folder, error)
        raise


def check_trainer_folder(folder: Path) -> None:
    """Refuse a Trainer's checkpoint whose writer was ended.

    Raises:
        ConfigError: its ``trainer_state.json`` is missing or cut off.
    """
    found = _state_of(folder)
    if found == "whole":
        return
    others = (path for path in folder.parent.glob("checkpoint-*") if path.name[11:].isdigit())
    older = sorted(others, key=lambda path: int(path.name[11:]), reverse=True)
    whole = next((path for path in older if _state_of(path) == "whole"), None)
    remedy = "There is no complete one beside it: start anew."
    if whole is not None:
        remedy = f"Call train(resume_from_checkpoint={str(whole)!r}), the newest complete one."
    raise ConfigError(
        f"train: {str(folder)!r} is not a complete checkpoint: its {TRAINER_STATE}, which is "
        f"written last, is {found}, so the process was ended while it saved. {remedy}"
    )


def _state_of(folder: Path) -> str:
    """``whole``, ``missing`` or ``cut off``."""
    try:
        json.loads((folder / TRAINER_STATE).read_bytes())
    except FileNotFoundError:
        return "missing"
    except ValueError:
        return "cut off"
    return "whole"


def _check_whole(folder: Path, accelerator: Any) -> None:
    """The files that this rank alone has written with ``torch.save``: each ends as a zip file."""
    names = rf"random_states_{accelerator.process_index}\.pkl"
    if accelerator.is_main_process:
        names += r"|(optimizer|scheduler|sampler)(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
    if accelerator.num_processes == 1:  # else every rank writes it, perhaps just now
        names += r"|scaler\.pt"
    for path in sorted(folder.iterdir()):
        if re.fullmatch(names, path.name) and not _is_whole(path):
            raise OSError(
                f"save_state: {str(path)!r} is cut off ({path.stat().st_size} bytes) though torch "
                "has reported no error. Is the disk full?"
            )


def _is_whole(path: Path) -> bool:
    """Whether what torch.save began to write has its end; a device would be read for ever."""
    return path.is_file() and zipfile.is_zipfile(path)


def _put_mark(path: Path, accelerator: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT, encoding="utf-8")
    if accelerator.is_main_process:
        for other in path.parent.glob(f"{MARK}.*"):  # of ranks that are no more
            number = other.suffix[1:]
            if number.isdigit() and int(number) >= accelerator.num_processes:
                other.unlink(missing_ok=True)


def _tell_unfinished(folder: Path, error: BaseException) -> None:
    """torch says of a full disk "unexpected pos 64 vs 0"."""
    space = ""
    if folder.is_dir():
        space = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there. "
    logger.error(
        f"the checkpoint {str(folder)!r} was not finished ({type(error).__name__}: {error}). "
        f"{space}The run can go on; save elsewhere, or there again. Until then this folder is "
        "refused."
    )
