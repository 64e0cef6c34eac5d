"""Colours of the page, light and dark, and of the pictures; matplotlib's settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError

HUES = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "line": ("#d8dee4", "#30363d"),
    "paper": ("#ffffff", "#161b22"),
    "ground": ("#f5f7f9", "#0d1117"),
    "bad": ("#c84e00", "#ff8f4a"),
    "warn": ("#8a6100", "#e3b341"),
    "good": ("#1a7f37", "#4ac26b"),
    "run-0": ("#0072b2", "#58b0ea"),
    "run-1": ("#b5407c", "#f08fc0"),
    "run-2": ("#00795a", "#3fcf9d"),
    "run-3": ("#8a6100", "#e3b341"),
    "forward": ("#56b4e9", "#56b4e9"),
    "backward": ("#0072b2", "#2f8fd8"),
    "clip": ("#e69f00", "#e69f00"),
    "step": ("#009e73", "#12b886"),
    "optimizer": ("#cc79a7", "#e39bc4"),
    "wait": ("#6e7781", "#8b949e"),
}
"""Of each name the colour on light and on dark paper. Told apart by those who see colours
differently as well (after Okabe and Ito); lines of several runs also differ in their dashes."""

LIGHT = {name: light for name, (light, _) in HUES.items()}
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))
"""Of each run's lines: lengths drawn and left out."""

STYLE: dict[Any, Any] = {
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.dpi": 100,
    "figure.facecolor": LIGHT["paper"],
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "grid.color": LIGHT["line"],
    "hatch.color": LIGHT["soft"],
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "savefig.bbox": None,
    "savefig.dpi": 160,  # twice the screen's resolution
    # A name from the file is text, never mathematics.
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
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
            "or leave --format out: the page needs nothing."
        ) from None
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        # A script that the font lacks: the PNG shows boxes.
        warnings.filterwarnings("ignore", message=r".*Glyph \d+")
        yield
