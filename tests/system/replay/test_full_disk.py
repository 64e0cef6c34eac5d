"""A file may not grow beyond a limit while an overflow is saved: told, and training goes on."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import overflowing
import pytest
from children import in_child


@pytest.mark.parametrize("most", [0, 100, 5000, 20_000])
def test_nothing_is_left_and_training_goes_on(most: int, tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        overflowing.main(str(folder), "net")

    assert in_child(body, tmp_path / "said") == 0
    assert not list(folder.iterdir())


def test_with_room_it_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert in_child(lambda: overflowing.main(str(folder), "net"), tmp_path / "said") == 0
    assert [each.name for each in folder.iterdir()] == ["overflow-000001-rank0.pt"]
