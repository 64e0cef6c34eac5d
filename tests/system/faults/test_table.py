"""docs/faults.md: each test that it names is there, each number is that of the code."""

from __future__ import annotations

import ast
import re

import pytest
from places import ROOT
from ranks_script import TIMEOUT_S

from accel_scaler.async_optimizer.worker import EXIT_LIMIT_S
from accel_scaler.scaling import WAIT_LIMIT_S
from accel_scaler.scaling.overflow_streak import MOST_WARNINGS, TOLD_AT
from accel_scaler.telemetry.record_queue import MAX_WAIT_S, MAX_WAITING

COLUMNS = 5
LINES = [
    line for line in (ROOT / "docs/faults.md").read_text("utf-8").splitlines() if line[:1] == "|"
]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES[2:]]


def missing(name: str) -> str:
    """Why ``file::function`` is no test; "" if it is one."""
    file, _, function = name.partition("::")
    path = ROOT / (file if "/" in file else f"tests/system/faults/{file}")
    if not path.is_file():
        return f"{file} is not there"
    body = ast.parse(path.read_text("utf-8")).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return "" if function in names and function.startswith("test_") else f"{name} is not there"


def text_of(fault: str) -> str:
    (row,) = [row for row in ROWS if row[0].startswith(fault)]
    return " ".join(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_is_filled_and_its_tests_exist(row: list[str]) -> None:
    assert len(row) == COLUMNS
    assert all(row)
    names = re.findall(r"`([^`]*)`", row[-1])
    assert names
    assert re.sub(r"`[^`]*`|\s", "", row[-1]) == "", "something beside the tests' names"
    assert [why for name in names if (why := missing(name))] == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert missing("test_table.py::test_of_another_name")
    assert missing("test_of_another_name.py::test_a_test_that_is_not_there_is_noticed")


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("SIGKILL at", f"{MAX_WAIT_S:g} s or {MAX_WAITING} windows"),
        ("disk full for telemetry", f"{MAX_WAIT_S:g} s or {MAX_WAITING} windows"),
        ("one of two ranks hangs", f"with {TIMEOUT_S} s set"),
        ("NaN in every", f"at {TOLD_AT}, {10 * TOLD_AT}, {100 * TOLD_AT:,} ..."),
        ("infinite loss", f"then {TOLD_AT}, 143 and {10 * TOLD_AT}"),
        ("10,000 skips", f"({TOLD_AT}, {10 * TOLD_AT}, {100 * TOLD_AT:,})"),
        ("10,000 skips", f"at most {MOST_WARNINGS} "),
        ("the optimizer thread hangs", f"after {WAIT_LIMIT_S:g} s"),
        ("the optimizer thread hangs", f"waits {EXIT_LIMIT_S:g} s"),
    ],
)
def test_the_numbers_are_those_of_the_code(fault: str, part: str) -> None:
    assert part in text_of(fault)
