"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from ..console import counted, plain
from .figures import Picture
from .findings import facts, find
from .formatting import number
from .run_summary import Run
from .theme import BAD, INK, LINE, PAPER, SOFT
from .verdict import verdict_on

ROWS = 100
LEVELS = {
    "bad": ("Problem", BAD),
    "warn": ("Look", "#9a6700"),
    "note": ("Note", SOFT),
    "good": ("Fine", "#1a7f37"),
}

CSS = f"""
*{{box-sizing:border-box}}
body{{margin:0;background:{PAPER};color:{INK};
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}}
main{{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 4rem}}
h1{{font-size:1.6rem;line-height:1.25;margin:.5rem 0 .25rem}}
h2{{font-size:1.2rem;margin:2.4rem 0 .75rem;padding-bottom:.3rem;border-bottom:1px solid {LINE}}}
h3{{font-size:1rem;margin:1.5rem 0 .5rem}}
p{{margin:.35rem 0}}
h1,h2,h3,p,li{{overflow-wrap:anywhere}}
td,th{{overflow-wrap:break-word}}
.verdict{{font-size:1.1rem}}
.soft{{color:{SOFT}}}
.findings{{list-style:none;margin:0;padding:0}}
.findings li{{border:1px solid {LINE};border-left:5px solid var(--mark);border-radius:6px;
padding:.6rem .9rem;margin:.6rem 0}}
.findings .what{{font-weight:600}}
.findings b{{display:inline-block;color:var(--mark);font-size:.78rem;letter-spacing:.04em;
text-transform:uppercase;margin-right:.6rem}}
figure{{margin:1.5rem 0}}
.wide{{overflow-x:auto}}
figure img{{display:block;width:100%;min-width:38rem;height:auto}}
figcaption{{color:{SOFT};font-size:.9rem;margin-top:.4rem}}
table{{border-collapse:collapse;width:100%;font-size:.9rem}}
th,td{{text-align:left;vertical-align:top;padding:.35rem .9rem .35rem 0;
border-bottom:1px solid {LINE}}}
th{{color:{SOFT};font-weight:600}}
td.n,th.n{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
""".strip()


def html_page(runs: Sequence[Run], drawn: Sequence[tuple[str, Picture]]) -> str:
    """The whole page, with the pictures as SVG. All text is escaped; there is no script in it."""
    title = f"Loss scaling: {' and '.join(run.label for run in runs)}"
    body = [f"<h1>{escape(title)}</h1>", *(_verdict(run, len(runs)) for run in runs)]
    body += ["<h2>Summary</h2>", *(part for run in runs for part in _summary(run, len(runs)))]
    body += ["<h2>In numbers</h2>", _side_by_side(runs, [facts(run) for run in runs])]
    if drawn:
        body += ["<h2>Pictures</h2>", *(_figure(*each) for each in drawn)]
    body += [part for run in runs for part in _offenders(run, len(runs))]
    body += [part for run in runs for part in _firsts(run, len(runs))]
    body += ["<h2>Settings and versions</h2>", _settings(runs)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{CSS}\n</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"
    )


def _verdict(run: Run, runs: int) -> str:
    of = f"<b>{escape(run.label)}:</b> " if runs > 1 else ""
    return f'<p class="verdict">{of}{escape(verdict_on(run))}</p>'


def _heading(run: Run, runs: int) -> list[str]:
    return [f"<h3>{escape(run.label)}</h3>"] if runs > 1 else []


def _summary(run: Run, runs: int) -> list[str]:
    rows = []
    for finding in find(run):
        more = "".join(f"<p>{escape(t)}</p>" for t in (finding.look, finding.do) if t)
        word, mark = LEVELS[finding.level]
        rows.append(
            f'<li style="--mark:{mark}"><p class="what"><b>{word}</b>'
            f"{escape(finding.what)}</p>{more}</li>"
        )
    return [*_heading(run, runs), f'<ul class="findings">{"".join(rows)}</ul>']


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; columns named in ``numbers`` stand at the right. All texts are escaped here."""

    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="n"' if column in numbers else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    lines = [[cell("th", i, text) for i, text in enumerate(head)]]
    lines += [[cell("td", i, text) for i, text in enumerate(row)] for row in rows]
    text = "".join("<tr>" + "".join(row) + "</tr>" for row in lines)
    return f'<div class="wide"><table>{text}</table></div>'


def _side_by_side(runs: Sequence[Run], of: Sequence[Sequence[tuple[str, str]]]) -> str:
    """A row a key, a column a run."""
    names = list(dict.fromkeys(name for rows in of for name, _ in rows))
    tables = [dict(rows) for rows in of]
    head = ["", *(run.label for run in runs)]
    return _table(head, [[name, *(table.get(name, "") for table in tables)] for name in names])


def _figure(svg: str, picture: Picture) -> str:
    # An image of its own: neither names from the file nor ids meet those of the page.
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return (
        f'<figure><div class="wide"><img src="data:image/svg+xml;base64,{data}" '
        f'alt="{escape(picture.title)}"></div><figcaption>{escape(picture.caption)}</figcaption>'
        "</figure>"
    )


def _offenders(run: Run, runs: int) -> list[str]:
    worst = run.worst_offenders()
    if not worst:
        return []
    rows = [
        [
            o.name,
            f"{o.windows}",
            f"{o.began}",
            run.place(o.first_x),
            run.place(o.last_x),
            f"{o.most:,}" + (f" of {o.elements:,}" if o.elements else ""),
        ]
        for o in worst[:ROWS]
    ]
    head = ["parameter", "windows", "began there", "first", "last", "most elements"]
    rest = len(worst) - ROWS
    parts = ["<h2>Parameters with inf or NaN gradients</h2>", *_heading(run, runs)]
    parts.append(_table(head, rows, (1, 2, 3, 4, 5)))
    if rest > 0:
        parts.append(f'<p class="soft">and {counted(rest, "parameter")} more</p>')
    return parts


def _firsts(run: Run, runs: int) -> list[str]:
    if not run.firsts:
        return []

    def row(x: int, first: dict[str, Any]) -> list[str]:
        module = first["module"] + (f" ({first['class']})" if first["class"] else "")
        batch = "" if first["micro_batch"] is None else f"{first['micro_batch']}"
        ranges = [
            "" if pair is None else " to ".join(map(number, pair))
            for pair in (first["input"], first["output"])
        ]
        return [run.place(x), first["where"], module, batch, *ranges, first["text"]]

    head = ["step", "where", "module", "micro-batch", "input", "output", ""]
    parts = ["<h2>What was non-finite first</h2>", *_heading(run, runs)]
    parts.append(_table(head, [row(*first) for first in run.firsts], (3, 4, 5)))
    if run.firsts_lost:
        lost = counted(run.firsts_lost, "report")
        parts.append(f'<p class="soft">{lost} from the middle of the run left out</p>')
    return parts


def _settings(runs: Sequence[Run]) -> str:
    of = []
    for run in runs:
        rows: list[tuple[str, str]] = [("file", plain(run.path))]
        if run.sessions:
            last = run.sessions[-1]
            facts_of = dict(last.facts)
            if "unix_time" in facts_of:
                when = datetime.fromtimestamp(facts_of.pop("unix_time"), timezone.utc)
                rows.append(("started", f"{when:%Y-%m-%d %H:%M} UTC"))
            rows += [(key, str(value)) for key, value in (facts_of | last.settings).items()]
        of.append(rows)
    return _side_by_side(runs, of)
