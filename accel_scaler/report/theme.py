"""Colours for light and dark, and SVG that can stand in a page beside others."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DARK", "IN_PAGE", "LIGHT", "Theme", "drawing", "save_png", "save_stacked", "svg"]

DPI = 160
"""Twice the screen's resolution."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours by what they are for."""

    ink: str
    soft: str
    line: str
    paper: str
    bad: str
    runs: tuple[str, str, str, str]


# Told apart by those who see colours differently as well: lines also differ in their dashes.
LIGHT = Theme(
    ink="#1b1f24",
    soft="#57606a",
    line="#d5dbe1",
    paper="#ffffff",
    bad="#c84e00",
    runs=("#0072b2", "#b5407c", "#00795a", "#8a6100"),
)
DARK = Theme(
    ink="#e6edf3",
    soft="#a3adb8",
    line="#363d46",
    paper="#0f1318",
    bad="#ff8a50",
    runs=("#56b4e9", "#ee8fbf", "#35c79a", "#e0b040"),
)
# Colours nobody would choose stand for the page's variables and are replaced in the SVG.
IN_PAGE = Theme(
    ink="#010203",
    soft="#010204",
    line="#010205",
    paper="#010206",
    bad="#010207",
    runs=("#010210", "#010211", "#010212", "#010213"),
)
VARIABLES = {
    IN_PAGE.ink: "var(--ink)",
    IN_PAGE.soft: "var(--soft)",
    IN_PAGE.line: "var(--line)",
    IN_PAGE.paper: "var(--paper)",
    IN_PAGE.bad: "var(--bad)",
    **{color: f"var(--run-{index})" for index, color in enumerate(IN_PAGE.runs)},
}
STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.dpi": 100,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "savefig.bbox": None,
    "svg.fonttype": "none",
    # A name from the file is text, never mathematics.
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
}


@contextmanager
def drawing(theme: Theme) -> Iterator[None]:
    """Our style for what is drawn inside, whatever the user's matplotlibrc says.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            f"pictures need matplotlib ({error}): pip install accel_scaler[report], "
            "or use --text, which needs nothing."
        ) from None
    colors: dict[Any, Any] = {
        "text.color": theme.ink,
        "axes.edgecolor": theme.soft,
        "axes.facecolor": "none",
        "axes.labelcolor": theme.soft,
        "axes.titlecolor": theme.ink,
        "figure.facecolor": "none",
        "grid.color": theme.line,
        "xtick.color": theme.soft,
        "ytick.color": theme.soft,
        "hatch.color": theme.soft,
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, **colors})
        # A script that the font lacks: the browser has its own, and the PNG shows boxes.
        warnings.filterwarnings("ignore", message=r".*Glyph \d+")
        yield


def svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an ``<svg>`` element whose ids begin with ``prefix`` and colours are variables.

    ``label`` is read to those who cannot see it. Call it inside ``drawing(IN_PAGE)``.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Tags only: what stands between them is text from the file, where nothing is replaced.
    text = re.sub(r"<[^<>]+>", lambda match: _retag(match.group(), prefix), text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest.strip()}'


def _retag(tag: str, prefix: str) -> str:
    if tag.startswith(("<!", "<?")):
        return ""
    tag = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}-", tag)
    return re.sub("#0102[01][0-9a-f]", lambda color: VARIABLES.get(color[0], color[0]), tag)


def save_png(figure: Figure, path: Path, theme: Theme = LIGHT) -> None:
    """Write the figure on the theme's paper."""
    figure.savefig(path, format="png", dpi=DPI, facecolor=theme.paper)


def save_stacked(figures: Iterable[Figure], path: Path, theme: Theme = LIGHT) -> None:
    """Write all figures below each other into one picture."""
    from PIL import Image  # comes with matplotlib

    pictures = []
    for figure in figures:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, facecolor=theme.paper)
        pictures.append(Image.open(buffer).convert("RGB"))
    width, gap = max(each.width for each in pictures), DPI // 4
    height = sum(each.height + gap for each in pictures) - gap
    whole = Image.new("RGB", (width, height), theme.paper)
    top = 0
    for each in pictures:
        whole.paste(each, ((width - each.width) // 2, top))
        top += each.height + gap
    whole.save(path, optimize=True)
