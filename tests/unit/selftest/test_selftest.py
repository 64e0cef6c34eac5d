"""``accel-scaler test``: every row holds here, each can fail, and nothing is left behind."""

from __future__ import annotations

import json
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
from accel_scaler.scaling import GradScaler
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


def without_count(load: Any) -> Any:
    return lambda self, state: load(self, state | {"_growth_tracker": 0})


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "sync is torch's": (Clipping, "clip_norm", loosely),
    "overlap is torch's": (Replica, "step_part", twice),
    "float16 weights": (ParameterPair, "publish", lambda _: lambda *args: None),
    "retry loses no batch": (Retry, "make_again", lambda _: lambda *args: False),
    "save and resume": (GradScaler, "load_state_dict", lambda _: lambda *args: None),
}
"""A fault of the package for each row: an attribute, and what takes its place."""
OTHERS = [
    ("save and resume", (GradScaler, "load_state_dict", without_count)),
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
        assert (held.status, held.got) == ("ok", held.expected), held
        break_it(monkeypatch, fault)
        found = rows.attempt(row, rows.ROWS[row])
    assert found.status == "failed"
    assert found.got != found.expected
    assert "Window(" not in found.got, "what differs alone"


def test_every_row_has_its_fault() -> None:
    assert list(FAULTS) == [name for name in rows.ROWS if name not in NOT_HERE]


@pytest.mark.parametrize("row", [OFFLOAD, BUS])
def test_a_row_of_offload_says_that_there_is_nothing_to_move(row: str) -> None:
    with joined():
        found = rows.attempt(row, rows.ROWS[row])
    assert (found.status, found.got, found.reason) == ("not run", "", rows.NOTHING_TO_MOVE)


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
    assert found.reason.startswith("" if faulty is None else f"{faulty}: ")


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
    told = (text, "no error", "") if expected == "failed" else ("", "", text)
    assert (found.status, found.got, found.expected, found.reason) == (expected, *told)


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
    assert run("--json", str(tmp_path / "found.json")) == (fault is not None)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert logging.root.manager.disable == logging.NOTSET
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
    written = json.loads((tmp_path / "found.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    names = ["device", *rows.ROWS]
    assert [row["row"] for row in written["rows"]] == names
    assert max(map(len, lines)) <= 100
    begins = [at for at, line in enumerate(lines) if not line.startswith(" ")]
    for row, begin, end in zip(written["rows"], begins[1:], begins[2:], strict=False):
        expected = "not run" if row["row"] in NOT_HERE else "ok"
        assert row["status"] == ("failed" if row["row"] == fault else expected)
        told = " ".join(" ".join(lines[begin:end]).split())
        assert all(row[key] in told for key in ("row", "status", "got", "reason"))
        assert (row["expected"] in told) == (
            row["expected"] in ("", row["got"]) or row["status"] == "failed"
        )
        assert ("expected" in told) == (row["status"] == "failed")
    assert (written["ok"], written["not run"], written["failed"]) == (
        len(names) - 3 - (fault is not None), 3, int(fault is not None)
    )  # fmt: skip


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no such device": (["--device", "cuda:7"], ["cuda:7", "cpu"]),
    "no device": (["--device", "gpu"], ["'gpu'", "cpu"]),
    "trains nothing": (["--device", "meta"], ["meta", "cpu"]),
    "no process": (["--num_processes", "0", "--device", "cpu"], ["0", "1 to "]),
    "many processes": (["--num_processes", "9999", "--device", "cpu"], ["9999", "1 to "]),
    "for ranks": (["--num_processes", "2", "--device", "xpu"], ["xpu", "cpu"]),
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


@pytest.mark.parametrize("path", ["", "/dev/full"])
def test_a_file_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    assert run("--json", path) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"--json {path!r}: cannot be written" in said.err


def test_ctrl_c_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Clipping, "clip_norm", interrupt)
    assert run() == 130
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
