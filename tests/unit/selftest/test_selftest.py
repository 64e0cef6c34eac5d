"""``accel-scaler test``: every row holds here, each can fail, and nothing is left behind."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # now: it makes a folder for its cache
from accelerate.state import AcceleratorState, PartialState
from children import on_two_ranks

from accel_scaler import UnsupportedError, cli
from accel_scaler.optimizer_step.clipping import Clipping
from accel_scaler.optimizer_step.masters import ParameterPair
from accel_scaler.optimizer_step.replica import Replica
from accel_scaler.overflow.retry import Retry
from accel_scaler.scaling.update_rule import Rule
from accel_scaler.selftest import rows
from accel_scaler.selftest.training import joined

pytestmark = pytest.mark.usefixtures("one_thread")
OFFLOAD, BUS = "offload equals no offload", "GB/s of offload's copies"
NOT_HERE = {OFFLOAD, BUS, "ranks agree"}
"""Rows that a single process on a CPU does not run."""


def loosely(clip: Any) -> Any:
    return lambda self, parameters, max_norm, *rest: clip(self, parameters, 2 * max_norm, *rest)


def twice(step: Any) -> Any:
    return lambda *args: (step(*args), step(*args))[1]


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "sync is torch's": (Clipping, "clip_norm", loosely),
    "overlap is torch's": (Replica, "step_part", twice),
    "float16 weights": (ParameterPair, "publish", lambda _: lambda *args: None),
    "retry loses no batch": (Retry, "make_again", lambda _: lambda *args: False),
}
"""A fault of the package for each row: an attribute, and what takes its place."""
OTHERS = [
    ("sync is torch's", (Rule, "advance", lambda rule: lambda *args: rule(*args[:2], False))),
]


def break_it(monkeypatch: pytest.MonkeyPatch, fault: tuple[Any, str, Callable[[Any], Any]]) -> None:
    owner, name, make = fault
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def run(*arguments: str) -> int:
    return cli.main(["test", "--device", "cpu", *arguments])


@pytest.mark.parametrize(("row", "fault"), [*FAULTS.items(), *OTHERS])
def test_a_row_holds_and_its_fault_is_told(
    monkeypatch: pytest.MonkeyPatch, row: str, fault: tuple[Any, str, Callable[[Any], Any]]
) -> None:
    with joined():
        held = rows.attempt(row, rows.ROWS[row])
        assert held.status == "ok", held
        break_it(monkeypatch, fault)
        found = rows.attempt(row, rows.ROWS[row])
    assert found.status == "failed"
    assert "expected" in found.text or "differ, by up to" in found.text
    assert "Window(" not in found.text, "what differs alone"


def test_every_row_has_its_fault() -> None:
    assert list(FAULTS) == [name for name in rows.ROWS if name not in NOT_HERE]


@pytest.mark.parametrize("row", [OFFLOAD, BUS])
def test_a_row_of_offload_says_that_there_is_nothing_to_move(row: str) -> None:
    with joined():
        found = rows.attempt(row, rows.ROWS[row])
    assert (found.status, found.text) == ("not run", rows.NOTHING_TO_MOVE)


@pytest.mark.parametrize("faulty", [None, torch.float32, torch.float16])
def test_offload_is_compared_with_float32_and_with_float16_weights(
    monkeypatch: pytest.MonkeyPatch, faulty: torch.dtype | None
) -> None:
    """As on a device, where `tests/simulated` has the row as it is."""
    train = rows.trained

    def trained(case: Any) -> Any:
        seen = train(case)
        is_faulty = "offload" in case.settings and case.weights is faulty
        return seen._replace(state=seen.state + is_faulty)

    monkeypatch.setattr(rows, "is_host", lambda _: False)
    monkeypatch.setattr(rows, "trained", trained)
    monkeypatch.setattr(rows, "LARGE", (32, 16))
    with joined():
        found = rows.attempt(OFFLOAD, rows.ROWS[OFFLOAD])
    assert found.status == ("ok" if faulty is None else "failed")
    assert found.text.startswith("" if faulty is None else f"{faulty}: ")


@pytest.mark.process
@pytest.mark.parametrize("faulty", [False, True])
def test_ranks_agree_unless_one_of_them_is_at_fault(tmp_path: Path, faulty: bool) -> None:
    def body() -> None:
        PartialState(cpu=True)
        if faulty and torch.distributed.get_rank() == 1:
            Clipping.clip_norm = loosely(Clipping.clip_norm)  # type: ignore[method-assign]
        found = rows.attempt("ranks agree", rows.ROWS["ranks agree"])
        assert found.status == ("failed" if faulty else "ok"), found

    on_two_ranks(body, tmp_path)


REFUSALS = {
    "cpu": {},
    "cuda": {NotImplementedError: "not run"},
    "mps": {NotImplementedError: "not run", UnsupportedError: "not run"},
}


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("error", [NotImplementedError, UnsupportedError, RuntimeError])
def test_what_a_device_lacks_is_named_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception]
) -> None:
    def refuse(row: str) -> Any:
        raise error("no such\n kernel")

    there = SimpleNamespace(device=torch.device(kind))
    monkeypatch.setattr(rows, "PartialState", lambda: there)
    found = rows.attempt("a row", refuse)
    text = f"{error.__name__}: no such kernel"
    expected = REFUSALS[kind].get(error, "failed")
    assert (found.status, found.text) == (expected, text)


@pytest.mark.parametrize("fault", [None, "retry loses no batch"])
def test_the_command_tells_each_row_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: str | None,
) -> None:
    if fault is not None:
        break_it(monkeypatch, FAULTS[fault])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # a user's, and not of the rows
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", "overlap")
    assert run() == (fault is not None)
    assert list(tmp_path.iterdir()) == []
    assert logging.root.manager.disable == logging.NOTSET
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    told = {line[:27].strip(): line[27:36].strip() for line in lines if line[:1].strip()}
    expected = {name: "not run" if name in NOT_HERE else "ok" for name in rows.ROWS}
    expected |= {"row": "status", "device": "ok"} | ({} if fault is None else {fault: "failed"})
    totals = list(told)[-1]
    assert {name: status for name, status in told.items() if name != totals} == expected
    failed = int(fault is not None)
    assert lines[-1] == f"{len(rows.ROWS) - 2 - failed} ok, 3 not run, {failed} failed"
    assert any(" expected " in f" {line.strip()} " for line in lines) == bool(failed)


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no such device": (["--device", "cuda:7"], ["cuda:7", "cpu"]),
    "no device": (["--device", "gpu"], ["'gpu'", "cpu"]),
    "trains nothing": (["--device", "meta"], ["meta", "cpu"]),
    **{
        f"parameters {text!r}": (["--device", "cpu", "--parameters", text], [text, "1.5B", "10T"])
        for text in (
            *("", " ", "-5", "0", "0.4", "0.0001K", "nan", "inf", "1e9", "1,000", "1_000", "1.5GB"),
            *("6GiB", "B", "1.5 B B", "1..5B", ".5B", "1.B", "\u0661B", "1B\n", "11T", "9" * 400),
        )
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_anything_runs(
    capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, words = BAD[case]
    if "cuda:7" in arguments and torch.accelerator.is_available():
        pytest.skip("its devices may be there")
    assert cli.main(["test", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("accel-scaler: error: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 700
    shown = [word if len(word) < 100 else word[:50] for word in words]
    assert all(word.strip() in said.err for word in shown)


def test_ctrl_c_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Clipping, "clip_norm", interrupt)
    assert run() == 130
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
