"""What mkdocs runs as it builds the site: pages that are made, not written, and docstrings' roles.

Made are the first page (the README), the table of settings (from ``config.py``), the pages of the
commands (what ``--help`` prints) and those that lie above this folder. A README link to a file that
is no page of the site is an error here, as any broken link is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("", "test", "launch", "report")
ROLE = re.compile(r":(?:class|meth|func|attr|mod):`~?([\w.]+)`")
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"> ]+)")
SESSION = re.compile(r"((?:^(?:>>>|\.\.\.) .*\n?)+)", re.MULTILINE)
LINK = re.compile(r"(\]\(|(?:src|href)=\")(?!https?:|#)([^)#\"]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {
        "index.md": from_above("README.md"),
        "recipes.md": from_above("recipes/README.md"),
        "changelog.md": from_above("CHANGELOG.md"),
        "contributing.md": from_above("CONTRIBUTING.md"),
        "architecture.md": as_tables(from_above("ARCHITECTURE.md")),
        "settings.md": f"{files.src_uris['settings.md'].content_string}\n{settings()}",
        "command-line.md": f"{files.src_uris['command-line.md'].content_string}\n{commands()}",
    }
    for name, text in made.items():
        if (written := files.get_file_from_path(name)) is not None:
            files.remove(written)
        files.append(File.generated(config, name, content=text))
    for path in [*sorted(ROOT.glob("assets/*")), *sorted(ROOT.glob("recipes/*.ipynb"))]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Links out of ``docs`` go to the pages of the site."""
    for above, page in ABOVE.items():
        markdown = markdown.replace(f"](../{above}", f"]({page}")
    return markdown.replace("../assets/", "assets/")


def on_post_page(output: str, page: Page, **kwargs: Any) -> str:
    """Refuse a page that would fetch something when it is read."""
    fetched = FETCHED.search(output)
    if fetched is not None:
        raise PluginError(f"{page.file.src_uri}: it fetches {fetched[1]} from elsewhere")
    return output


def from_above(name: str) -> str:
    """A page that lies outside of ``docs``; its links go to the pages of the site.

    Raises:
        PluginError: a link to what is not there, or is in the repository but not in the site.
    """
    path = ROOT / name

    def moved(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / match[2]))
        if not target.exists():
            raise PluginError(f"{name}: a link to {match[2]}, which is not there")
        inside = target.relative_to(ROOT).as_posix()
        page = ABOVE.get(inside, inside.removeprefix("docs/"))
        if page == inside and not inside.startswith("assets/") and target.suffix != ".ipynb":
            raise PluginError(f"{name}: a link to {match[2]}, which is no page of the site")
        return match[1] + page

    return LINK.sub(moved, path.read_text(encoding="utf-8"))


ABOVE = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
}


def as_tables(text: str) -> str:
    """Each Mermaid picture of arrows as a table: what draws them is on a CDN."""

    def table(match: re.Match[str]) -> str:
        taken: dict[str, list[str]] = {}
        for above, count, below in re.findall(r"(\w+) -- (\d+) --> (\w+)", match[1]):
            taken.setdefault(above, []).append(f"`{below}` ({count})")
        rows = [f"| `{above}` | {', '.join(below)} |" for above, below in taken.items()]
        return "\n".join(["| Folder | Imports from (names taken) |", "|---|---|", *rows])

    return re.sub(r"```mermaid\n(.*?)```", table, text, flags=re.DOTALL)


def settings() -> str:
    """Every field of the one table in ``accel_scaler/config.py``: a heading and its text each."""
    from accel_scaler.config import ABOUT, FIELDS, KINDS

    parts = []
    for name, spec in FIELDS.items():
        parts.append(
            f"## `{name}`\n\n{ABOUT[name]}\n\n"
            f"Default `{spec.default!r}`. Takes {KINDS[name].allowed}.\n"
        )
    return "\n".join(parts)


def commands() -> str:
    """What each command's ``--help`` prints."""
    parts = []
    for command in COMMANDS:
        line = [*command.split(), "--help"]
        done = subprocess.run(
            [sys.executable, "-m", "accel_scaler", *line],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "COLUMNS": "90", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        if done.returncode != 0:
            raise PluginError(f"accel-scaler {' '.join(line)}: {done.stderr}")
        title = f"accel-scaler {command}".strip()
        parts.append(f"## `{title}`\n\n```text\n{done.stdout.strip()}\n```\n")
    return "\n".join(parts)


class DocstringsExtension(griffe.Extension):
    """``:class:`GradScaler``` in a docstring is a link to it; a name that is none is an error.

    Lines of a session (``>>>``) are code.
    """

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of what griffe has just read."""
        if obj.docstring is not None:
            text = ROLE.sub(r"[`\1`][\1]", obj.docstring.value)
            obj.docstring.value = SESSION.sub(r"```pycon\n\1```\n", text)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Of a field of the table in ``config.py`` its default is shown, not the whole row."""
        row = attr.value
        if isinstance(row, griffe.ExprCall) and str(row.function) in ("setting", "choice"):
            attr.value = row.arguments[0]
