"""``accel-scaler report``: a page that stands alone, words, one line for what fails."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.errors import ConfigError
from accel_scaler.report import command as report
from accel_scaler.report.reader import read_run
from unit.test_hostile_files import EVIL, run_with

VOID = {"meta", "br", "hr", "img", "link"}
CHARTS = ["scale", "norm", "lr", "time"]


class Page(HTMLParser):
    """The page as a browser reads it: tags in balance, attributes, scripts, and other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data
            if self.open[-1] == "td":
                self.cells.append(data)

    @property
    def drawn(self) -> list[str]:
        """What the page has charts of."""
        names = [v for tag, key, v in self.attributes if (tag, key) == ("figure", "id")]
        return [name.removeprefix("chart-") for name in names]


def call(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args([str(arg) for arg in argv]))


def bad_run(path: Path, **start: Any) -> Path:
    lines = t.story(300, lambda s, _: s < 2 or 200 <= s < 206, with_times=True)
    lines[0] = t.start(settings={"step_mode": "overlap"}, changed=["step_mode"], **start)
    first = {"where": "forward", "module": "transformer.h.3.mlp.c_fc", "class": "Conv1D"}
    first |= {"micro_batch": 2, "input": [-8.5, 9.0], "output": ["-inf", 65504.0], "text": "Boom."}
    return t.write(path, [x | {"first": first} if x.get("step") == 203 else x for x in lines])


def test_the_page_holds_all_and_needs_nothing_but_itself(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert call(bad_run(tmp_path / "run.jsonl"), "-o", out) == 0
    text = out.read_text("utf-8")
    page = Page(text)
    assert "5 steps (step 200 to step 205)" in page.text
    assert "step 203: Boom." in page.text.replace("Step", "step")
    assert "['transformer.h.3.mlp.c_fc']" in page.text
    assert {"2.13.0", "step_mode", "overlap"} <= set(page.cells)
    assert page.drawn == CHARTS
    assert not set(page.tags) & {"link", "iframe", "object", "embed", "img", "base"}
    for _, key, value in page.attributes:
        assert not key.startswith("on")
        assert key not in ("src", "href", "style", "action") or not value
    assert "@import" not in text
    assert "url(" not in text
    assert ("meta", "name", "viewport") in page.attributes
    used, known = (set(re.findall(rf"{by}--([\w-]+)", text)) for by in (r"var\(", r"[{{ ]"))
    hues = {
        each["hue"] for chart in json.loads(page.scripts[0])["charts"] for each in chart["lines"]
    }
    assert used | hues <= known


def test_a_browser_may_run_the_pages_own_script_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    call(bad_run(tmp_path / "run.jsonl"), "-o", out)
    text = out.read_text("utf-8")
    page = Page(text)
    (policy,) = [v for tag, key, v in page.attributes if key == "content" and "default-src" in v]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    kinds = {"script-src": page.scripts[-1], "style-src": style}
    for rule, content in kinds.items():
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(rule) == f"'sha256-{digest}'"
    assert rules == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert text.index("Content-Security-Policy") < text.index("<style") < text.index("<script")
    assert page.tags.count("script") == 2
    assert ("script", "type", "application/json") in page.attributes
    assert "\r" not in text


def test_nothing_in_a_file_becomes_markup(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    call(run_with(EVIL, tmp_path / "<b>&run.jsonl"), "-o", out)
    text = out.read_text("utf-8")
    page = Page(text)
    assert page.tags.count("script") == 2
    assert not set(page.tags) & {"img", "b&run.jsonl"}
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert EVIL[0] in page.cells
    assert "<b>&run.jsonl" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2028\u2029\u202e]", text)
    assert not set("<>&\u2028") & set(page.scripts[0])


def test_the_file_of_one_of_several_ranks_says_whose_it_is(tmp_path: Path) -> None:
    run = read_run(bad_run(tmp_path / "1.jsonl", rank=1, ranks=2))
    assert run.label == "1.jsonl (rank 1)"


def test_an_empty_file_makes_a_report_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "empty.jsonl", tmp_path / "report.html"
    path.touch()
    assert call(path, "-o", out) == call(path, "--text") == 0
    assert capsys.readouterr().err == "empty.jsonl: no steps in this file.\n" * 2
    page = Page(out.read_text("utf-8"))
    assert "There were no steps." in page.text
    assert page.drawn == []


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = bad_run(tmp_path / "run.jsonl")
    for target in (tmp_path, tmp_path / "no" / "r.html"):
        with pytest.raises(ConfigError, match=r"cannot be written .*-o") as caught:
            call(run, "-o", target)
        assert str(target) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    run = bad_run(tmp_path / "run.jsonl")
    before = run.read_bytes()
    with pytest.raises(ConfigError, match="is the file to read"):
        call(run, "-o", run)
    with pytest.raises(SystemExit):
        call(run, "--text", "-o", tmp_path / "x")
    assert run.read_bytes() == before
