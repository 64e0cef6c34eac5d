"""Colours and matplotlib settings of the pictures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError

INK = "#1b1f24"
SOFT = "#57606a"
LINE = "#d5dbe1"
PAPER = "#ffffff"
BAD = "#c84e00"
RUNS = ("#0072b2", "#b5407c", "#00795a", "#8a6100")
"""Told apart by those who see colours differently as well; lines also differ in their dashes."""

STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "grid.color": LINE,
    "hatch.color": SOFT,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "savefig.bbox": None,
    "savefig.dpi": 160,  # twice the screen's resolution
    "svg.fonttype": "none",
    "svg.hashsalt": "accel_scaler",  # the same file gives the same picture
    # A name from the file is text, never mathematics.
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


@contextmanager
def drawing() -> Iterator[None]:
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
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        # A script that the font lacks: the browser has its own, and the PNG shows boxes.
        warnings.filterwarnings("ignore", message=r".*Glyph \d+")
        yield
