"""Whether a folder can be written to, or made: asked without making anything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_scaler.places import why_no_folder


def a_file(folder: Path) -> str:
    (folder / "file").write_text("x")
    return "file"


def below_a_file(folder: Path) -> str:
    return os.path.join(a_file(folder), "a", "b")


def a_loose_link(folder: Path) -> str:
    (folder / "link").symlink_to("nowhere")
    return os.path.join("link", "a")


def a_long_name(folder: Path) -> str:
    return os.path.join("new", "a" * 300)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (a_file, "{}/file is no folder"),
        (below_a_file, "{}/file is no folder"),
        (a_loose_link, "{}/link is a link to nothing"),
        (a_long_name, "File name too long"),
    ],
)
def test_where_there_can_be_none(
    make: Callable[[Path], str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    for each in (path, str(tmp_path / path)):
        assert why.format(tmp_path) in (why_no_folder(each) or "")
        with pytest.raises(OSError):  # noqa: PT011
            os.makedirs(each)
        for folder in tmp_path.glob("new"):  # which makedirs has made on its way
            folder.rmdir()
    assert sorted(tmp_path.rglob("*")) == there


def test_where_there_can_be_one_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "there").mkdir()
    for path in ("there", "a/b/c", "~/new", ".", str(tmp_path / "x")):
        assert why_no_folder(path) is None
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_what_the_system_forbids_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right that is missing, a disk that is read-only: known by trying, whoever asks."""

    def refused(**kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", kwargs["dir"])

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert why_no_folder(str(tmp_path / "a" / "b")) == f"{tmp_path}: Permission denied"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do all")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert why_no_folder(str(tmp_path / "a")) == f"{tmp_path}: Permission denied"
    finally:
        tmp_path.chmod(0o700)
