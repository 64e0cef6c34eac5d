"""The site of ``make docs``, opened by a file manager: its search works, and nothing is fetched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("playwright.sync_api")
from page_picture import BROWSER, MISSING, chromium

pytestmark = [pytest.mark.process, pytest.mark.skipif(BROWSER is None, reason=MISSING)]


MY_RUN_SAYS = "a.md-search-result__link[href*='my-run-says.html']"


def test_a_word_is_found_without_a_server_and_an_error_text_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    with chromium() as browser:
        for name in ("start.html", "api/attach.html"):
            page = browser.new_context(offline=True).new_page()
            said: list[str] = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.goto((tmp_path / name).as_uri())
            page.locator("input.md-search__input").focus()
            page.keyboard.type("skip_norm_above")
            found = page.locator("a.md-search-result__link[href*='settings.html']")
            found.first.wait_for(state="attached")
            assert said == []
        for words in ("Attempting to unscale FP16 gradients", "NaN loss"):
            page = browser.new_context(offline=True).new_page()
            page.goto((tmp_path / "start.html").as_uri())
            page.locator("input.md-search__input").focus()
            page.keyboard.type(words)
            last = words.split()[-1].lower()  # in the links once all of it has been searched for
            page.locator(f"{MY_RUN_SAYS}[href*='{last}']").first.wait_for(state="attached")
            first = page.locator("a.md-search-result__link").first.get_attribute("href")
            assert "my-run-says.html" in str(first), words
