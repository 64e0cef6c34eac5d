"""The rows of the test. A new row is an entry of ``CASES`` or of ``ROWS``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import ne
from typing import Literal

import accelerate
import torch
from accelerate.state import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from ..console import number, say
from ..devices import device_name, is_host, present_type, total_memory
from ..errors import ConfigError, UnsupportedError
from .bus import copies
from .sizes import WIDTH
from .training import Case, Seen, Window, joined, reference, trained

CASES = {
    "sync is torch's": Case({}),
    "overlap is torch's": Case({"step_mode": "overlap"}, adam=True),
    "float16 weights": Case({}, weights=torch.float16),
}
"""Each is trained attached, and by ``reference`` in plain torch."""
LARGE = 2048, 3072
"""Widths of a model whose state passes through the device in seven stretches."""
LINE = "{:<25}  {:<7}  {}".format
RESULT_WIDTH = WIDTH - len(LINE("", "", ""))
OFFLOAD, BUS = "offload equals no offload", "GB/s of offload's copies"
NOTHING_TO_MOVE = "no accelerator: state is in host memory anyway"


@dataclass(frozen=True)
class Result:
    """One row; ``"not run"``: it says nothing about this machine, for the reason in ``text``."""

    row: str
    status: Literal["ok", "failed", "not run"]
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    """What the row has measured."""

    def lines(self) -> Iterator[str]:
        """The row as it is printed."""
        for at, text in enumerate(textwrap.wrap(self.text, RESULT_WIDTH) or [""]):
            yield LINE(*("", "") if at else (self.row, self.status), text).rstrip()


def compare(row: str, got: Seen, expected: Seen) -> Result:
    """``"ok"`` if everything is equal, bit for bit; else the row shows the first difference."""
    for at, pair in enumerate(zip(got.windows, expected.windows, strict=True), 1):
        names = [name for name, *both in zip(Window._fields, *pair, strict=True) if ne(*both)]
        if names:
            told = [", ".join(f"{name} {getattr(each, name)}" for name in names) for each in pair]
            return Result(row, "failed", f"step {at}: {told[0]}; expected {told[1]}")
    for name in ("weights", "state"):
        mine, plain = getattr(got, name), getattr(expected, name)
        if not mine.equal(plain):
            many, most = int((mine != plain).sum()), float((mine - plain).abs().max())
            text = f"{name}: {many} of {len(plain)} differ, by up to {most:.2g}"
            return Result(row, "failed", text)
    skips, scale = sum(window.skipped for window in got.windows), number(got.windows[-1].scale)
    return Result(row, "ok", f"{skips} of {len(got.windows)} skipped, scale {scale}")


def beside_plain_torch(row: str) -> Result:
    return compare(row, trained(CASES[row]), reference(CASES[row]))


def offload(row: str) -> Result:
    """State in host memory beside state on the device, with float32 weights, then with float16."""
    for weights in (torch.float32, torch.float16):
        case = Case({"offload": "cpu"}, True, weights, LARGE)
        found = compare(row, trained(case), trained(case._replace(settings={})))
        if found.status == "failed":
            return replace(found, text=f"{weights}: {found.text}")
    return found


def bus(row: str) -> Result:
    """GB/s of copies between host memory and the device, as offload makes them; ranks copy at
    once."""
    numbers, is_pinned = copies(PartialState().device)
    text = "up {up:.1f}, down {down:.1f}, both at once {both:.1f}".format(**numbers)
    text += "" if is_pinned else "; memory that is not pinned"
    return Result(row, "ok", text, numbers)


def retried(row: str) -> Result:
    """A run from a scale that overflows, beside a run from a scale that does not. The scales stay
    apart, so they are not compared; a loss of inf is skipped all the same."""
    got, expected = (
        seen._replace(windows=[window._replace(scale=1.0) for window in seen.windows])
        for seen in map(trained, (Case({"on_overflow": "retry", "init_scale": 2.0**24}), Case({})))
    )
    return compare(row, got, expected)


def ranks(row: str) -> Result:
    """Each rank has its own data, and only the last rank overflows: all skip, and stay equal."""
    every = gather_object([trained(CASES["overlap is torch's"])])
    if len(every) == 1:
        return Result(row, "not run", "one process; --help says how to start two")
    results = [compare(row, each, every[0]) for each in every]
    return next((each for each in results if each.status == "failed"), results[0])


ROWS: dict[str, Callable[[str], Result]] = {
    **dict.fromkeys(CASES, beside_plain_torch),
    OFFLOAD: offload,
    BUS: bus,
    "retry loses no batch": retried,
    "ranks agree": ranks,
}
SIZING: dict[str, Callable[[str], Result]] = {BUS: bus}
"""The row from which :mod:`.sizes` says what offload costs."""
LONG = {OFFLOAD: "four trainings of 6.3 million parameters", BUS: "18 copies of 256 MiB"}
"""Rows that take long on a device, and why."""


def device() -> Result:
    """The named device, or else Accelerate's choice. Raises ``ConfigError`` where it is not
    there."""
    present = present_type()
    default = "cpu" if parse_flag_from_env("ACCELERATE_USE_CPU") else present
    name = os.environ.get("ACCELERATE_TORCH_DEVICE", default)
    try:
        found = torch.empty(1, device=name).device
        if found.type not in ("cpu", present):
            raise ValueError("it trains nothing")
    except Exception as error:  # each backend has a class of its own
        expected = "cpu" if present == "cpu" else f"cpu or {present}"
        raise ConfigError(f"device {name!r}: expected {expected} ({_line(error)}).") from error
    total = None if is_host(found) else total_memory(found)
    memory = "" if total is None else f", {total / 1e9:.1f} GB"
    text = f"{found.type}, {device_name(found)}{memory}; torch {torch.__version__}, "
    return Result("device", "ok", f"{text}Accelerate {accelerate.__version__}")


def in_turn(first: Result, rows: dict[str, Callable[[str], Result]]) -> Iterator[Result]:
    """``first``, then each of ``rows`` at its end; on ranks other than 0 nothing. Before one that
    takes long a line says so."""
    with joined() as state:
        if state.is_main_process:
            yield first
        for name, function in rows.items():
            if state.is_main_process and name in LONG and not is_host(state.device):
                say(f"running {name}: {LONG[name]} ...")
            mine = attempt(name, function)
            every: list[Result] = gather_object([mine])
            if state.is_main_process:
                yield next((each for each in every if each.status == "failed"), mine)


def attempt(name: str, function: Callable[[str], Result]) -> Result:
    """The row on this rank. An exception fails it, unless torch or Accelerate lacks something for
    this device, or, on a device other than a CPU or CUDA, this package refuses."""
    kind = PartialState().device.type
    if name in (OFFLOAD, *SIZING) and is_host(PartialState().device):
        return Result(name, "not run", NOTHING_TO_MOVE)
    lacks = () if kind == "cpu" else (NotImplementedError,)
    refuses = () if kind in ("cpu", "cuda") else (UnsupportedError,)
    try:
        return function(name)
    except (*lacks, *refuses) as error:
        return Result(name, "not run", _line(error))
    except Exception as error:  # of any class, which the row names
        return Result(name, "failed", _line(error))


def _line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
