"""One queue: what waits for its update, what is written together, what is written at once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from accel_scaler.optimizer_step import StepTiming
from accel_scaler.telemetry import record_queue
from accel_scaler.telemetry.record import Names, Record
from accel_scaler.telemetry.record_queue import OpenRecord, RecordQueue


class Journal:
    """Remembers what would be written."""

    start_s = 0.0

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed: list[str | None] = []

    def append(self, record: Record, names: Names) -> None:
        self.records.append(record)

    def close(self, error: str | None = None) -> None:
        self.closed.append(error)

    @property
    def steps(self) -> list[int]:
        return [record.index for record in self.records]


def timing(finished: bool = True, **values: Any) -> Any:
    return StepTiming(**({"start": 7.0, "busy": 2.0, "inline": True} | values), finished=finished)


def window(index: int, *timings: Any, found_inf: bool = False, **values: Any) -> OpenRecord:
    record = Record(index, 8.0, 8.0, found_inf, None, found_inf=found_inf)
    return OpenRecord(record, timings=list(timings), **values)


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_queue, "MAX_WAIT_S", 1e9)


def test_the_last_window_waits_for_who_may_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_queue, "MAX_WAIT_S", 0.0)
    journal: Any = Journal()
    queue, seen = RecordQueue(journal), []
    for index in range(3):
        queue.append(window(index))
        seen.append(list(journal.steps))
    queue.flush()
    assert [*seen, journal.steps] == [[], [0], [0, 1], [0, 1, 2]]
    queue.error = "E"
    queue.close()
    assert journal.closed == ["E"]


@pytest.mark.usefixtures("never_late")
def test_windows_are_written_together_and_overflows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_queue, "MAX_WAITING", 3)
    journal: Any = Journal()
    queue, counts = RecordQueue(journal), []
    for index in range(9):
        queue.append(window(index, found_inf=index == 4))
        counts.append(len(journal.steps))
    assert counts == [0, 0, 0, 3, 3, 5, 5, 5, 8]


@pytest.mark.usefixtures("never_late")
def test_an_update_that_runs_is_waited_for_in_order_but_not_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal: Any = Journal()
    queue, slow = RecordQueue(journal), timing(finished=False)
    queue.append(window(0, slow))
    queue.append(window(1, found_inf=True))
    queue.append(window(2))
    assert journal.steps == []
    slow.finished = True
    queue.append(window(3, timing(finished=False), found_inf=True))
    monkeypatch.setattr(record_queue, "MAX_WAIT_S", 0.0)
    queue.append(window(4))
    assert journal.steps == [0, 1, 2]
    monkeypatch.setattr(record_queue, "MAX_WAITING", 2)
    queue.append(window(5))
    assert journal.steps == [0, 1, 2, 3, 4]
    assert journal.records[-2].optimizer_us is None


def test_what_is_known_only_after_the_step_joins_the_record() -> None:
    waits = [(8.0, 0.5, "w"), (8.75, 0.25, "b")]
    beside = timing(inline=False, waits=waits)
    open_record = window(0, timing(start=6.0, busy=1.0), beside, timing(finished=False))
    assert not open_record.is_complete
    record = open_record.complete()
    assert (record.optimizer_us, record.waited_us) == (3_000_000, 1_750_000)


def test_the_errors_of_several_previews_are_one_number() -> None:
    late = timing(delay_compensation="preview", preview_error=0.5)
    bare = timing(delay_compensation="none")
    other = timing(delay_compensation="preview", preview_error=0.25)
    running = timing(finished=False, delay_compensation="preview", preview_error=9.0)
    record = window(0, late, timing(), bare, other, running).complete()
    assert record.preview_error == 0.5
    assert window(0, bare).complete().preview_error is None


def test_a_closed_record_keeps_nothing_alive() -> None:
    class Parameter: ...

    parameter = Parameter()
    gone = weakref.ref(parameter)
    open_record = window(0, timing(inline=False, waits=[(0.0, 1.0, parameter)]))
    open_record.complete()
    del parameter
    gc.collect()
    assert gone() is None
