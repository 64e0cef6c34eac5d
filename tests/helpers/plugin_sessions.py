"""Runs of pytest, one after the other, each in a fork of a process that has loaded torch already.

Not a test: ``test_plugin.py`` starts it with the runs as JSON on its standard input, and reads what
each printed and what it left changed from the standard output.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler

import accel_scaler

VARIABLES = ("PYTHON", "ACCEL_SCALER_", "PYTEST_WITH_")
QUICK = ["-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cacheprovider", "--tb=short"]
"""Without plugins that take longer to load than a run."""
HARNESS = "torch.testing._internal.common_device_type"


def surroundings() -> dict[str, Any]:
    """All that the plugin may touch."""
    return {
        "torch.amp.GradScaler": torch.amp.GradScaler.__init__,
        "torch.cpu.amp.GradScaler": torch.cpu.amp.GradScaler.__init__,
        "Accelerator": accelerate.Accelerator.__init__,
        "sys.meta_path": list(sys.meta_path),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
    }


def stock_names() -> list[Any]:
    """An object of each stock name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            torch.amp.GradScaler("cpu"),
            torch.GradScaler("cpu"),
            torch.cpu.amp.GradScaler(),
            torch.cuda.amp.GradScaler(enabled=False),
        ]


def left_changed(arguments: list[str]) -> list[str]:
    """Run pytest; what is not as before."""
    before = surroundings()
    pytest.main(arguments)
    left = [name for name, value in surroundings().items() if value != before[name]]
    if any(isinstance(scaler, accel_scaler.GradScaler) for scaler in stock_names()):
        left.append("a stock name")
    return left


def forked(arguments: list[str], folder: Path) -> dict[str, Any]:
    """The same in a child, which ends here."""
    output, result = folder / "output.txt", folder / "result.json"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(folder)
            result.write_text(json.dumps(left_changed(arguments)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    text = output.read_text()
    assert status == 0, text
    return {"text": text, "left": json.loads(result.read_text())}


def main() -> None:
    """Every run gets a folder of its own, with its files in it."""
    if find_spec("expecttest"):
        importlib.import_module(HARNESS)  # which takes longer to load than to run
    gc.freeze()  # pytest collects garbage as it ends
    found = {}
    for name, run in json.load(sys.stdin).items():
        with tempfile.TemporaryDirectory() as folder:
            for file, text in run["files"].items():
                Path(folder, file).write_text(text)
            found[name] = forked([*QUICK, "--rootdir", folder, *run["args"]], Path(folder))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
