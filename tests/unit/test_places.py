"""Whether a folder can be written to, or made: asked without making anything."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from accel_scaler.places import why_no_folder


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", "{}/file is no folder"),
        ("file/a/b", "{}/file is no folder"),
        ("link/a", "{}/link is a link to nothing"),
        ("new/" + "a" * 300, "File name too long"),
    ],
)
def test_where_no_folder_can_be(
    path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for each in (path, str(tmp_path / path)):
        assert why.format(tmp_path) in (why_no_folder(each) or "")
    assert sorted(tmp_path.rglob("*")) == before


def test_where_a_folder_can_be_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/a/b/c", str(tmp_path), str(tmp_path / "x")):
        assert why_no_folder(path) is None
    assert not os.listdir(tmp_path)


def test_a_refusal_of_the_system_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", kwargs["dir"])

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert why_no_folder(str(tmp_path / "a" / "b")) == f"{tmp_path}: Permission denied"
