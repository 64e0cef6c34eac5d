"""The room for slots, over windows whose memory is written down here."""

from __future__ import annotations

import pytest
import torch

from accel_scaler.devices import MemoryUse
from accel_scaler.optimizer_step import room as room_module
from accel_scaler.optimizer_step.room import Room


class Allocator:
    """Counts as torch's allocators do."""

    def __init__(self) -> None:
        self.now = self.ever = self.peak = 0

    def take(self, size: int) -> None:
        self.now += size
        self.ever += size
        self.peak = max(self.peak, self.now)

    def free(self, size: int) -> None:
        self.now -= size

    def use(self, device: torch.device) -> MemoryUse:
        return MemoryUse(self.now, self.ever, self.peak)


class Slots:
    """What a ring says of its slots."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.held = self.made = 0


def room_of(slots: Slots) -> Room:
    return Room(slots)  # type: ignore[arg-type]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(room_module, "memory_use", found.use)
    return found


class Run:
    """A room, and windows beside it."""

    def __init__(self, memory: Allocator) -> None:
        self.memory, self.slots = memory, Slots()
        self.room = room_of(self.slots)

    def window(self, size: int = 1000, take: bool = False) -> list[int]:
        """Four layers whose activations have ``size`` bytes each, and a tenth for a moment; slots
        take all the room there is, if they ``take`` it. Returns the room at each look of the
        backward."""
        found, room, memory, slots = [], self.room, self.memory, self.slots
        room.begin()
        for layer in range(4):
            room.left(100 + layer)
            memory.take(size)
        for layer in range(4):
            memory.take(size // 10)
            memory.free(size + size // 10)
            found.append(room.left(layer, until_step=True))
            if take and found[-1] > slots.held:
                memory.take(found[-1] - slots.held)
                slots.made += found[-1] - slots.held
                slots.held = found[-1]
        room.end()
        memory.free(slots.held)
        slots.held = 0
        room.after_step()
        return found


def test_slots_take_what_activations_have_left(memory: Allocator) -> None:
    run = Run(memory)
    assert run.window() == [0, 0, 0, 0], "nothing is known yet"
    peak = memory.peak
    for _ in range(5):
        assert run.window(take=True) == [1000, 2000, 3000, 4100]
    assert memory.peak == peak


def test_a_larger_window_is_only_measured(memory: Allocator) -> None:
    run = Run(memory)
    run.window()
    assert run.window(2000, take=True) == [0, 0, 0, 0]
    peak = memory.peak
    assert run.window(2000, take=True) == [2000, 4000, 6000, 8200]
    assert run.window(1000, take=True) == [2000, 4000, 6000, 8200]
    assert memory.peak == peak


def test_a_peak_that_has_risen_leaves_less(memory: Allocator) -> None:
    run = Run(memory)
    run.window()
    memory.peak += 300
    run.window(take=True)
    assert run.window(take=True) == [700, 1700, 2700, 3800]


def test_the_backward_keeps_what_its_later_looks_need(memory: Allocator) -> None:
    """Slots that come up stay up until the step."""
    run = Run(memory)
    for _ in range(2):
        found = []
        run.room.begin()
        for layer in range(4):
            run.room.left(100 + layer)
            memory.take(1000)
        for layer in range(4):
            memory.take(1500 if layer == 2 else 0)
            memory.free(2500 if layer == 2 else 1000)
            found.append(run.room.left(layer, until_step=True))
        run.room.end()
        run.room.after_step()
    assert memory.peak == 4000
    assert found == [500, 500, 3000, 4000]


@pytest.mark.parametrize("risen", [0, 300])
def test_the_forward_lets_slots_stay_until_the_next_look(memory: Allocator, risen: int) -> None:
    run = Run(memory)
    run.window()
    memory.peak += risen
    run.window()
    run.room.begin()
    found = []
    for layer in range(4):
        found.append(run.room.left(100 + layer))
        memory.take(1000)
    assert found == [3100 - risen, 2100 - risen, 1100 - risen, -risen]


def test_between_two_steps_slots_stay_beside_what_usually_comes_there(memory: Allocator) -> None:
    run = Run(memory)
    found = []
    for _ in range(3):
        run.window()
        found.append(run.room.after_step())
        memory.take(1500)  # a teacher
        memory.free(1500)
    assert found == [0, memory.peak - 1500, memory.peak - 1500]


def test_nothing_is_known_where_the_backend_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    room = room_of(Slots())
    monkeypatch.setattr(room_module, "memory_use", lambda device: None)
    for _ in range(2):
        assert room.left(100) == room.left(0, until_step=True) == 0
        room.end()
        assert room.after_step() == 0
