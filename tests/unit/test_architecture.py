"""ARCHITECTURE.md shows today's code: its picture of imports, and every file that it names."""

from __future__ import annotations

import re

import pytest
from package_imports import FOLDERS, PACKAGE, PAGE, drawn, picture
from places import ROOT

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_picture_is_the_code() -> None:
    assert drawn() == picture(), "python tests/helpers/package_imports.py draws it anew"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+[a-z]\.py)`", TEXT))))
def test_a_file_that_is_named_is_there(name: str) -> None:
    places = [ROOT / name, PACKAGE / name, *(PACKAGE / folder / name for folder in FOLDERS)]
    assert sum(place.exists() for place in places) == 1


def test_every_folder_is_described() -> None:
    table = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert sorted(table) == sorted(FOLDERS)
    assert sorted(table) == sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py"))
