"""A report's page down to the first row of its charts as a picture, for the README (`make report`).

    python tests/helpers/page_picture.py out/report/report.html assets/report.png

It needs a browser (apt-get install chromium).
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WIDTH = 1120
MISSING = "no browser: apt-get install chromium"


@contextmanager
def chromium() -> Iterator[Any]:
    """The machine's browser, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio-waitpid"):  # asyncio's, for the browser that has ended
            thread.join(10)


def main(page: Path, picture: Path) -> None:
    if BROWSER is None:
        sys.exit(MISSING)
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": WIDTH, "height": 1000}, device_scale_factor=1.5)
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("html[data-drawn]")
        row = "document.querySelectorAll('.charts')[1].children[0].getBoundingClientRect().bottom"
        size = {"x": 0, "y": 0, "width": WIDTH, "height": tab.evaluate(row) + 16}
        tab.screenshot(path=picture, clip=size, full_page=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
