"""Imports point only upwards in the list of modules; nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "accel_scaler"

# Each module may import those above it. The place of modules still to come is kept by this order.
ORDER = [
    "version",
    "config",
    "devices",
    "telemetry",
    "journal",
    "rule",
    "gradients",
    "measures",
    "agreement",
    "due",
    "windows",
    "remedies",
    "culprits",
    "nametable",
    "ranges",
    "traces",
    "blame",
    "hooks",
    "finder",
    "interrupts",
    "checkpoints",
    "backlog",
    "timeline",
    "fused",
    "stepper",
    "memory",
    "threads",
    "scaler",
    "recording",
    "boundary",
    "worker",
    "pending",
    "transfer",
    "slots",
    "attributes",
    "surroundings",
    "steppable",
    "small",
    "shadow",
    "intake",
    "flight",
    "engine",
    "fences",
    "async_optimizer",
    "takeover",
    "prepared",
    "products",
    "autocast",
    "attach",
    "trainer",
    "__init__",
    "section",
    "settings",
    "ending",
    "launched",
    "terminal",
    "launch",
    "survey",
    "hazards",
    "doctor",
    "fields",
    "wording",
    "samples",
    "ledger",
    "extras",
    "reading",
    "findings",
    "canvas",
    "figures",
    "heat",
    "page",
    "report",
    "cli",
    "__main__",
]

# The one upward look: attach() hands a Trainer over at call time, when transformers is loaded.
LATE = {("attach", "trainer")}

ONLY_IN = {
    "transformers": {"trainer"},
    "accelerate": {"attach", "autocast", "doctor", "launch", "prepared", "survey", "takeover"},
    "matplotlib": {"canvas", "figures", "heat", "report"},
    "yaml": {"config", "section", "settings"},
}


def imports(path: Path) -> list[tuple[str, bool]]:
    """``(module, relative)`` for every import statement anywhere in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level and node.module is None:
                found += [(alias.name, True) for alias in node.names]
            else:
                found.append(((node.module or "").split(".")[0], bool(node.level)))
    return found


def test_every_module_is_in_the_order() -> None:
    assert sorted(p.stem for p in PACKAGE.glob("*.py")) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_upwards(name: str) -> None:
    above = set(ORDER[: ORDER.index(name)])
    for module, relative in imports(PACKAGE / f"{name}.py"):
        if relative:
            assert module in above or (name, module) in LATE, f"{name} imports {module}"
        else:
            assert name in ONLY_IN.get(module, {name}), f"{name} imports {module}"


IMPORT_CHECK = """
import os, threading, sys
import torch, accelerate
from accelerate.optimizer import AcceleratedOptimizer
before = (dict(os.environ), threading.active_count(), torch.amp.GradScaler.step,
          accelerate.Accelerator.__init__, AcceleratedOptimizer.step)
import accel_scaler
after = (dict(os.environ), threading.active_count(), torch.amp.GradScaler.step,
         accelerate.Accelerator.__init__, AcceleratedOptimizer.step)
assert before == after
assert "matplotlib" not in sys.modules
for name in accel_scaler.__all__:
    assert getattr(accel_scaler, name).__doc__, name
"""


def test_importing_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_CHECK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
