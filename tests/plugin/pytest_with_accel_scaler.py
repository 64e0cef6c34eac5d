"""Run anybody's tests with ``accel_scaler`` in place of the stock gradient scaler.

    pip install -e tests/plugin          # from this project's folder, next to accel_scaler itself
    pytest --with-accel-scaler path/     # from any folder, on any tests; they are not changed

Without the option the plugin imports nothing and changes nothing. With it, in the process that runs
the tests and in every Python that they start:

- ``torch.amp.GradScaler``, ``torch.GradScaler``, ``torch.cuda.amp.GradScaler`` and
  ``torch.cpu.amp.GradScaler`` make an ``accel_scaler.GradScaler``, under whatever name and whenever
  they were imported, and so do subclasses of them. ``isinstance`` goes on working both ways.
- each ``accelerate.Accelerator`` with ``mixed_precision="fp16"`` and each ``transformers.Trainer``
  with such an accelerator is attached (``accel_scaler.attach``). Tests that leave the precision
  open get it from the environment: ``ACCELERATE_MIXED_PRECISION=fp16 pytest ...``. On a CPU, stock
  Accelerate trains those in float32 without a word, and ours in float16: numbers then differ.

Left alone: torch's ``ShardedGradScaler`` (FSDP1) where no Accelerator holds it; Accelerators under
DeepSpeed, Megatron-LM, XLA or fp8, which scale by themselves; Pythons started with -I, -E or -S.

Options:
    --accel-scaler-mode sync|overlap|delayed   how attached optimizers step (default: sync, or
                                               ACCEL_SCALER_STEP_MODE). The other settings of
                                               ACCEL_SCALER_* hold as well.
    --accel-scaler-only torch|accelerate       replace torch's scaler only, or attach only.

The header says what is replaced, the summary how often it was; a run in which nothing was replaced
ends with a warning. Works with pytest-xdist. ``torch.testing._internal`` and ``unittest`` tests run
as they are: ``pytest --with-accel-scaler test_torch.py -k grad_scal``.

A test that fails: run it without the option first. The differences that are meant are in the
README: what it mends (F1 to F13), and ``.grad`` being None after a step in overlap and delayed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEY = pytest.StashKey["Any"]()
STARTUP = Path(__file__).resolve().parent / "pytest_with_accel_scaler_startup"
REPLACED = {
    "torch": "torch's GradScaler (torch.amp, torch.cuda.amp, torch.cpu.amp) replaced",
    "accelerate": "fp16 Accelerators and Trainers attached",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; see the top of this file."""
    group = parser.getgroup("accel_scaler")
    group.addoption(
        "--with-accel-scaler",
        action="store_true",
        help="run the tests with accel_scaler in place of torch's GradScaler, and attached to "
        "every Accelerator",
    )
    group.addoption(
        "--accel-scaler-mode",
        choices=("sync", "overlap", "delayed"),
        help="how optimizers of attached Accelerators step (default: sync)",
    )
    group.addoption(
        "--accel-scaler-only",
        choices=tuple(REPLACED),
        help="replace only torch's GradScaler, or only attach",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest can import a scaler."""
    _start(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Where a conftest has named this plugin, which is later."""
    _start(config, config.option)


def _start(config: pytest.Config, option: Any) -> None:
    if not option.with_accel_scaler:
        for name in ("accel_scaler_mode", "accel_scaler_only"):
            if getattr(option, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise pytest.UsageError(f"{flag} does nothing without --with-accel-scaler; add it.")
    elif KEY not in config.stash:
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        config.stash[KEY] = stack.enter_context(_replaced(option))


@contextlib.contextmanager
def _replaced(option: Any) -> Iterator[Any]:
    """Install the replacement here and in child processes; afterwards all is as before."""
    import accel_scaler_replacing as replacing

    with contextlib.ExitStack() as stack:
        if option.accel_scaler_mode is not None:
            stack.enter_context(_variable("ACCEL_SCALER_STEP_MODE", option.accel_scaler_mode))
        there = replacing.current()
        if there is not None:  # a worker of xdist, or another run inside this process
            yield there
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="with_accel_scaler_"))
        tally = Path(folder) / "tally"
        tally.touch()
        only = option.accel_scaler_only
        parts = list(REPLACED) if only is None else [only]
        replacement = replacing.Replacement(_startup_of_accel_scaler(), parts, str(tally))
        path = os.environ.get("PYTHONPATH")
        # An empty entry would mean the current directory.
        entries = [str(STARTUP)] if not path else [str(STARTUP), path]
        stack.enter_context(_variable("PYTHONPATH", os.pathsep.join(entries)))
        stack.enter_context(_variable(replacing.VARIABLE, replacement.to_environment()))
        replacement.install()
        stack.callback(replacement.undo)
        yield replacement


def _startup_of_accel_scaler() -> str:
    spec = importlib.util.find_spec("accel_scaler")
    if spec is None or spec.origin is None:
        raise pytest.UsageError(
            "--with-accel-scaler: accel_scaler is not installed for this Python; install it "
            "(pip install . in its folder), or run pytest from an environment that has it."
        )
    if os.pathsep in str(STARTUP):
        raise pytest.UsageError(
            f"--with-accel-scaler: the plugin lies in {str(STARTUP)!r}; a path with "
            f"{os.pathsep!r} cannot stand in PYTHONPATH. Install it elsewhere."
        )
    return str(Path(spec.origin).parent / "launch" / "startup")


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def pytest_report_header(config: pytest.Config) -> str | None:
    """One line: what was replaced, with what, from where."""
    replacement = config.stash.get(KEY, None)
    if replacement is None:
        return None
    what = ", ".join(REPLACED[part] for part in replacement.parts)
    mode = os.environ.get("ACCEL_SCALER_STEP_MODE", "sync")
    return f"accel_scaler: {what}; step_mode={mode}; from {Path(replacement.startup).parents[1]}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many were replaced, and a warning if none was."""
    replacement = config.stash.get(KEY, None)
    if replacement is None:
        return
    counts = replacement.counts()
    terminalreporter.section("accel_scaler")
    terminalreporter.write_line(_sentence(counts))
    for event in sorted(counts):
        if event.startswith("refused: "):
            why = event.removeprefix("refused: ")
            terminalreporter.write_line(f"not attached ({_times(counts[event])}): {why}")
    if not (counts["scaler"] or counts["accelerator"]):
        terminalreporter.write_line(
            "WARNING: nothing was replaced, so these tests have shown nothing about accel_scaler. "
            "No test made a GradScaler of torch's or an Accelerator with mixed_precision='fp16'"
            f"{' (' + _left(counts) + ')' if _left(counts) else ''}. For tests that leave the "
            "precision open, set ACCELERATE_MIXED_PRECISION=fp16.",
            yellow=True,
        )


def _sentence(counts: Counter[str]) -> str:
    said = [
        f"{counts['scaler']} GradScaler{_s(counts['scaler'])} replaced",
        f"{counts['accelerator']} Accelerator{_s(counts['accelerator'])} attached",
    ]
    if counts["trainer"]:
        said.append(f"{counts['trainer']} Trainer{_s(counts['trainer'])} attached")
    left = _left(counts)
    return ", ".join(said) + (f"; {left}" if left else "")


def _left(counts: Counter[str]) -> str:
    said = []
    if counts["unscaled"]:
        said.append(f"{counts['unscaled']} Accelerator{_s(counts['unscaled'])} without fp16")
    if counts["sharded"]:
        said.append(f"{counts['sharded']} ShardedGradScaler{_s(counts['sharded'])}")
    return "left alone: " + ", ".join(said) if said else ""


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
