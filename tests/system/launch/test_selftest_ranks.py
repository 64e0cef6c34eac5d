"""``accel-scaler test`` on two ranks, started by itself and by ``accel-scaler launch``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import OURS, run

from accel_scaler.selftest.rows import ROWS

pytestmark = pytest.mark.process
TEST = [sys.executable, "-m", "accel_scaler", "test", "--device", "cpu", "--num_processes", "2"]
LAUNCH = [
    *OURS, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0",
    "-m", "accel_scaler", "test",
]  # fmt: skip


@pytest.mark.parametrize("command", [TEST, LAUNCH], ids=["by itself", "launched"])
def test_two_ranks_run_every_row_and_one_tells(tmp_path: Path, command: list[str]) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    if command is TEST:  # the user's own config has no say
        (tmp_path / "accelerate").mkdir()
        (tmp_path / "accelerate" / "default_config.yaml").write_text("gpu_ids: [")
    code, out, err = run(
        [*command, "--json", "found.json"],
        tmp_path, ACCELERATE_USE_CPU="true", TMPDIR=str(temporary), HF_HOME=str(tmp_path),
    )  # fmt: skip
    assert code == 0, out + err
    found = json.loads((tmp_path / "found.json").read_text())
    others = [row["row"] for row in found["rows"] if row["status"] != "ok"]
    assert others == ["offload equals no offload", "GB/s of offload's copies"]
    assert (found["not run"], found["failed"]) == (2, 0)
    assert len(found["rows"]) == 1 + len(ROWS)
    assert out.count("ranks agree") == 1
    torchs = ("torchinductor_", *["torchelastic_"] * (command is LAUNCH))
    assert [path for path in temporary.iterdir() if not path.name.startswith(torchs)] == []
