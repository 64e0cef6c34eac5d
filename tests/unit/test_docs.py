"""README and docs: every file, test and make target that they name is there.

Links and anchors of the site, and names of the API, are mkdocs' business: `make docs`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml
from places import ROOT

import accel_scaler
from accel_scaler import ScalerConfig

PAGES = [*ROOT.glob("*.md"), ROOT / "recipes/README.md", *ROOT.glob("docs/**/*.md")]
PAGES.sort()
API = sorted(ROOT.glob("docs/api/*.md"))
TARGETS = re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text("utf-8"), re.M)


def names(pages: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_a_link_out_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    links += re.findall(r"(?:src|srcset|href)=\"(?!https?:|#)([^\"#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_and_make_targets_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    paths = re.findall(r"\b(?:tests|recipes|benchmarks|accelerate_configs)/[\w/.-]*\w", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = re.findall(r"(?:`|^|    )make ([a-z][\w-]*)", text, re.M)
    assert [target for target in targets if target not in TARGETS] == []


def test_every_public_name_has_a_place_among_the_pages_of_the_api() -> None:
    shown = [re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M) for page in API]
    names = {name for found in shown for name in found}
    assert {f"accel_scaler.{name}" for name in accel_scaler.__all__} <= names


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert {page for page in pages if not re.search(rf": {re.escape(page)}$", text, re.M)} == set()


def test_the_readme_is_a_page_long() -> None:
    """What has no place in it has one in docs."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_headline_and_its_picture_are_rows_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    headline = importlib.import_module("headline")
    table = headline.shares((ROOT / "docs/offload.md").read_text("utf-8"))
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    (first,) = re.findall(
        r"([\d]+) % of the GPU memory at ([\d]+) % of the speed \(a simulated (.+?)\)", readme
    )
    speed, memory = table[first[2]]
    assert (int(first[0]), int(first[1])) == (round(memory * 100), round(speed * 100))
    assert (ROOT / "assets/offload.svg").read_text("utf-8") == headline.picture(table), (
        "make picture"
    )
    (alt,) = re.findall(r'offload.svg" .*?alt="([^"]+)"', readme)
    assert re.findall(r"(\d+) %", alt) == [
        f"{share * 100:.0f}" for share in (memory, *(each for each, _ in table.values()))
    ]


def test_the_citation_names_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (found["title"], found["version"]) == ("accel_scaler", accel_scaler.__version__)
    needed = {"cff-version", "message", "title", "authors"}
    assert needed <= found.keys(), "what the format requires"


def test_the_api_is_read_as_it_is() -> None:
    """The package is lazy and its settings are rows of a table: griffe, which runs nothing, has to
    find all the same where each name is from, and what each field's default is."""
    griffe = pytest.importorskip("griffe")
    pytest.importorskip("mkdocs")
    extensions = griffe.load_extensions(f"{ROOT / 'docs/build_pages.py'}:DocstringsExtension")
    package = griffe.load("accel_scaler", search_paths=[str(ROOT)], extensions=extensions)
    for name in accel_scaler.__all__:
        assert package[name].has_docstring, name
    fields = package["ScalerConfig"].parameters
    shown = {each.name: str(each.default) for each in fields if each.default is not None}
    assert shown.pop("init_scale") == "2.0 ** 16"
    defaults = {name: ast.literal_eval(text) for name, text in shown.items()}
    known = {field.name: field.default for field in dataclasses.fields(ScalerConfig)}
    assert {**defaults, "init_scale": 2.0**16} == known
