"""``accel-scaler test`` on two ranks, started by ``accel-scaler launch``."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import OURS, run

from accel_scaler.selftest.rows import ROWS

pytestmark = pytest.mark.process
COMMAND = [*OURS, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


def test_two_ranks_run_every_row_and_one_tells(tmp_path: Path) -> None:
    command = [*COMMAND, "-m", "accel_scaler", "test"]
    code, out, err = run(command, tmp_path, ACCELERATE_USE_CPU="true")
    assert code == 0, out + err
    others = ["offload equals no offload", "GB/s of offload's copies"]
    assert [line[:25].strip() for line in out.splitlines() if " not run " in line] == others
    assert f"{len(ROWS) + 1 - len(others)} ok, 2 not run, 0 failed" in out
    assert out.count("ranks agree") == 1
