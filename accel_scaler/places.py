"""Whether something can be written at a path, found out without making anything."""

from __future__ import annotations

import os
import tempfile

__all__ = ["why_no_folder"]


def why_no_folder(path: str) -> str | None:
    """Why there can be no folder at ``path`` into which this process writes; None: there can.

    Folders above it may be missing: it looks at the nearest one that is there.
    """
    place, missing = os.path.abspath(os.path.expanduser(path)), []
    try:
        while not _is_there(place):
            if os.path.islink(place):
                return f"{place} is a link to nothing"
            place, name = os.path.split(place)
            missing.append(name)
        if not os.path.isdir(place):
            return f"{place} is no folder"
        for name in missing:  # of one that is too long the system says so where its folder is there
            _is_there(os.path.join(place, name))
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place}: {error.strerror}"


def _is_there(place: str) -> bool:
    """Raises ``OSError`` for a place where one has no right to look, or a name that cannot be."""
    try:
        os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
