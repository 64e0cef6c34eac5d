"""The host's copy of scale and tracker: never older than the tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from accel_scaler import GradScaler
from accel_scaler.scaling import update_rule
from accel_scaler.scaling.update_rule import HostMirror, ScaleState


def test_it_follows_tensors_that_are_written_or_replaced() -> None:
    mirror, scale, tracker = HostMirror(), torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    assert mirror.read(scale, tracker) == (8.0, 1)
    scale.fill_(4.0)  # as torch's own helpers do
    assert mirror.read(scale, tracker) == (4.0, 1)
    tracker.fill_(7)
    assert mirror.read(scale, tracker) == (4.0, 7)
    assert mirror.read(torch.tensor(2.0), tracker) == (2.0, 7)
    assert mirror.read(scale, torch.tensor(3)) == (4.0, 3)
    mirror.write(scale, tracker, (16.0, 0))
    assert (float(scale), int(tracker)) == mirror.read(scale, tracker) == (16.0, 0)


def test_what_was_written_is_not_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, scale, tracker = HostMirror(), torch.tensor(8.0), torch.tensor(1)
    mirror.write(scale, tracker, (4.0, 2))
    monkeypatch.setattr(update_rule, "float", lambda _: 1 / 0, raising=False)
    assert mirror.read(scale, tracker) == (4.0, 2)


def test_a_concurrent_reader_caches_no_old_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read the old scale when the boundary writes the new one: that one stands.

    What it then kept beside the new version was the scale of the next window.
    """
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    inside, go_on = threading.Event(), threading.Event()

    def slow(scale: torch.Tensor) -> float:
        number = float(scale)
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(0.5)  # nobody comes where a lock keeps the writer out
        return number

    scaler._scale.add_(0.0)  # type: ignore[union-attr]  # what is known of it is out of date
    monkeypatch.setattr(update_rule, "float", slow, raising=False)
    reader = threading.Thread(target=scaler.get_scale)
    reader.start()
    assert inside.wait(10)
    scaler.write_state(ScaleState(512.0, 0))
    go_on.set()
    reader.join(10)
    assert scaler.get_scale() == 512.0
