"""The first picture in the README: what `offload="cpu"` saves and costs, as its table says.

    python benchmarks/headline.py docs/offload.md assets/offload.svg     # or: make picture

The table is the output of `make bench-offload`, on simulated machines; the picture has its rows
of eight micro-batches of 4,096 tokens with the default budget. It is narrow, with large letters in
grey on no background: legible on a phone, on white and on black.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROW = "8 x 4,096"
INK, MEMORY, SPEED, REST = "#808893", "#e0803c", "#3d78b8", "#80889340"
WIDTH, LEFT, BAR, LINE = 440, 146, 24, 34


def shares(page: str) -> dict[str, tuple[float, float]]:
    """Speed and peak memory of each machine, as shares of those of the run without offload."""
    found = {}
    for machine, speed, memory in re.findall(
        rf"^\| ([\w ]+), [^|]+ \| {ROW} \|[^|]+\| ([\d.]+) at ([\d.]+) \|", page, re.MULTILINE
    ):
        found[machine] = float(speed), float(memory)
    if not found:
        raise SystemExit(f"headline: the page has no table with rows of {ROW}")
    return found


def picture(machines: dict[str, tuple[float, float]]) -> str:
    """The SVG: a bar of memory, then one of speed for each machine; pale is what is gone."""
    rows = [("peak memory", max(memory for _, memory in machines.values()), MEMORY)]
    rows += [(f"speed, {machine}", speed, SPEED) for machine, (speed, _) in machines.items()]
    full = WIDTH - LEFT - 56
    about = "AdamW in host memory, 100 %: on the GPU"
    parts = [text(0, 18, about, 'font-weight="600"')]
    for y, (name, share, color) in zip(range(34, 1000, LINE), rows, strict=False):
        parts += [text(0, y + 18, name), bar(y, full, REST), bar(y, full * share, color)]
        parts.append(text(LEFT + full + 8, y + 18, f"{share * 100:.0f} %", 'font-weight="600"'))
    end = 34 + LINE * len(rows)
    parts.append(
        text(0, end + 14, f"simulated GPUs, {ROW} tokens a step, clipped", 'font-size="15"')
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 24}" role="img" '
        f'font-family="sans-serif" font-size="16">\n<title>{about}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def bar(y: float, width: float, color: str) -> str:
    return f'<rect x="{LEFT}" y="{y:g}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{INK}" {more}>{words}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path, help="the page with the table")
    parser.add_argument("output", type=Path, help="the SVG to write")
    args = parser.parse_args()
    svg = picture(shares(args.page.read_text("utf-8")))
    args.output.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
