"""Where things are, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
"""What tests share, and the scripts that they launch."""

ROOT = HELPERS.parents[1]
