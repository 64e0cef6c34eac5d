"""The rows of ``accel-scaler test`` that move state, on a device that reports races."""

from __future__ import annotations

from typing import Any

import pytest
from accelerators import KIND, MISSING, is_simulated

from accel_scaler import cli
from accel_scaler.optimizer_step import offloaded
from accel_scaler.optimizer_step.ring import Ring
from accel_scaler.selftest import bus, rows
from accel_scaler.selftest.training import joined

OFFLOAD, BUS = "offload equals no offload", "GB/s of offload's copies"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(MISSING) or not is_simulated() or KIND != "npu",
        reason="no simulated accelerator that Accelerate takes (SIM_NAME=npu)",
    ),
]


@pytest.mark.parametrize("faulty", [False, True])
def test_offload_equals_no_offload_unless_nothing_is_stored(
    monkeypatch: pytest.MonkeyPatch, faulty: bool
) -> None:
    store = Ring.store

    def without_copies(self: Any, slot: Any, block: Any, targets: Any) -> None:
        store(self, slot, block, {})

    monkeypatch.setattr(rows, "LARGE", (64, 64))
    monkeypatch.setattr(offloaded, "SMALLEST_BLOCK", 512)
    if faulty:
        monkeypatch.setattr(Ring, "store", without_copies)
    with joined():
        found = rows.attempt(OFFLOAD, rows.ROWS[OFFLOAD])
    assert found.status == ("failed" if faulty else "ok"), found


def test_the_speed_of_copies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "COPIED", 1 << 20)
    with joined():
        found = rows.attempt(BUS, rows.ROWS[BUS])
    assert found.status == "ok"
    words = found.text.replace("at once ", "").split(", ")
    assert [word.split()[0] for word in words] == ["up", "down", "both"]
    assert all(float(word.split()[1]) > 0 for word in words)


def test_the_command_says_what_offload_costs_by_this_bus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bus, "COPIED", 1 << 20)
    assert cli.main(["test", "--parameters", "1.5B"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    (running,) = [at for at, line in enumerate(lines) if line.startswith("running ")]
    assert BUS in lines[running]
    assert lines[running + 1].startswith(BUS)
    assert "2 ok, 0 not run, 0 failed" in lines
    shown = {line[:46].strip(): line[46:].split() for line in lines}
    for title in (
        "seconds up",
        "seconds down",
        "seconds both ways at once",
        "tokens that hide it at 100 TFLOP/s",
    ):
        assert all(float(each.replace(",", "")) > 0 for each in shown[title])
