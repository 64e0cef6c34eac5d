"""The simulated accelerator keeps its own promises: costs, memory, and a race that is noticed.

A test reads the simulated clocks, which do not depend on how busy this machine is. Of the real
clock it asserts no more than that the time has passed. See Note [Costs] in sim.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import DEVICE, MISSING, event, is_simulated, module, on
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING) or not is_simulated(), reason="no simulated accelerator"),
]

MB = 1_000_000
UP, DOWN, MEMORY, TFLOPS = 0.4, 0.25, 0.2, 0.002
"""GB or TFLOP a second: so slow that a busy machine can follow."""
TRIES = 5
"""Other processes may keep the thread that enqueues from running, so the clock goes on."""


@pytest.fixture(autouse=True)
def costs() -> Iterator[None]:
    yield
    module().set_cost()


def set_costs() -> None:
    module().set_cost(up_gbps=UP, down_gbps=DOWN, memory_gbps=MEMORY, tflops=TFLOPS)


def milliseconds(work: Callable[[], object], side: Sequence[torch.Stream]) -> float:
    """From the first task of ``work`` to the end of all its streams, by the simulated clocks."""
    module().synchronize()
    started = time.monotonic()
    begin = event(timed=True)
    for stream in side:
        stream.wait_event(begin)
    work()
    for stream in side:
        torch.accelerator.current_stream().wait_stream(stream)
    end = event(timed=True)
    module().synchronize()
    taken = begin.elapsed_time(end)
    assert time.monotonic() - started > 0.9 * taken / 1e3
    return taken


def takes(expected: float, work: Callable[[], object], *side: torch.Stream) -> None:
    """Assert that ``work`` takes so many milliseconds."""
    for _ in range(TRIES):
        found = milliseconds(work, side)
        if found == pytest.approx(expected, rel=0.05):
            return
    assert found == pytest.approx(expected, rel=0.05)


def pinned(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8).pin_memory()


def device_bytes(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE)


class Copies:
    """Copies of 100 MB on a stream of each direction."""

    def __init__(self, size: int = 100 * MB) -> None:
        self.size = size
        self.up, self.down = torch.Stream(DEVICE), torch.Stream(DEVICE)
        self.source, self.target = pinned(size), pinned(size)
        self.x, self.y = device_bytes(size), device_bytes(size)

    def rise(self, to: Tensor | None = None, stream: Any = None, size: int | None = None) -> None:
        to, size = self.x if to is None else to, size or self.size
        with on(stream or self.up):
            to[:size].copy_(self.source[:size], non_blocking=True)

    def fall(self) -> None:
        with on(self.down):
            self.target.copy_(self.y, non_blocking=True)

    def both(self) -> None:
        self.rise()
        self.fall()

    def two_up(self) -> None:
        self.rise()
        self.rise(self.y, self.down)

    def many_up(self) -> None:
        for _ in range(1000):
            self.rise(size=self.size // 1000)


def test_copies_take_their_bytes_by_the_bandwidth_of_their_engine() -> None:
    copies = Copies()
    set_costs()
    takes(100 / UP, copies.rise, copies.up)
    takes(100 / DOWN, copies.fall, copies.down)
    takes(100 / DOWN, copies.both, copies.up, copies.down)  # one engine for each direction
    takes(200 / UP, copies.two_up, copies.up, copies.down)  # one engine for both streams
    takes(100 / UP, copies.many_up, copies.up)


def test_a_copy_from_pageable_memory_is_slow_and_keeps_the_host() -> None:
    copies, pageable = Copies(20 * MB), torch.zeros(20 * MB, dtype=torch.uint8)
    home = torch.accelerator.current_stream()
    set_costs()
    takes(80 / UP, lambda: copies.x.copy_(pageable, non_blocking=True))
    copies.x.copy_(pageable, non_blocking=True)
    assert home.query()  # the host has waited
    module().set_cost(up_gbps=0.04)
    copies.rise(stream=home)
    assert not home.query()


def on_two_streams(copies: Copies, x: Tensor, y: Tensor) -> None:
    with on(copies.up):
        x.mul_(2)
    with on(copies.down):
        y.mul_(2)


def test_kernels_take_their_bytes_or_their_flops() -> None:
    copies = Copies(1)
    a, c = torch.zeros(512, 512, device=DEVICE), torch.zeros(4, 512, 512, device=DEVICE)
    b, d = (torch.zeros(4, 128, 512, device=DEVICE) for _ in range(2))
    v, w = (torch.zeros(5 * MB, device=DEVICE) for _ in range(2))
    set_costs()
    product = 2 * 512**3 / TFLOPS / 1e9
    takes(product, lambda: a @ a)
    takes(product, lambda: torch.addmm(a, a, a))
    takes(product, lambda: torch.bmm(b, c))
    takes(product + 8 * d.numel() / MEMORY / 1e6, lambda: torch.baddbmm(d, b, c))  # and a copy
    takes(40 / MEMORY, lambda: v.mul_(2))  # read and written
    takes(20 / MEMORY, lambda: v.zero_())  # written
    takes(80 / MEMORY, lambda: on_two_streams(copies, v, w), copies.up, copies.down)
    module().set_cost(launch_us=300)
    takes(60, lambda: [v[:4].mul_(2) for _ in range(200)])


def test_attention_and_convolutions_take_their_flops() -> None:
    qkv = [torch.zeros(2, 4, 512, 32, device=DEVICE, requires_grad=True) for _ in range(3)]
    x = torch.zeros(2, 32, 64, 64, device=DEVICE, requires_grad=True)
    kernel = torch.zeros(64, 32, 3, 3, device=DEVICE, requires_grad=True)

    def attention() -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv)[0]
        return out

    def convolution() -> Tensor:
        return F.conv2d(x, kernel, padding=1)

    def backward(out: Tensor, inputs: list[Tensor]) -> Callable[[], object]:
        gradient = torch.zeros_like(out)
        return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    set_costs()
    forward = 2 * 2 * 4 * 512 * 512 * 64 / TFLOPS / 1e9
    takes(forward, attention)
    takes(2.5 * forward, backward(attention(), qkv))
    forward = 2 * convolution().numel() * 32 * 9 / TFLOPS / 1e9
    takes(forward, convolution)
    takes(2 * forward, backward(convolution(), [x, kernel]))


def test_a_kernel_runs_beside_a_copy_and_behind_an_event() -> None:
    copies, a = Copies(40 * MB), torch.zeros(512, 512, device=DEVICE)
    product = 2 * 512**3 / TFLOPS / 1e9

    def beside() -> None:
        copies.rise()
        a @ a

    def behind() -> None:
        copies.rise()
        torch.accelerator.current_stream().wait_event(copies.up.record_event())
        a @ a

    set_costs()
    takes(max(product, 40 / UP), beside, copies.up)
    takes(product + 40 / UP, behind, copies.up)


def test_without_arithmetic_a_model_has_its_real_size() -> None:
    module().set_cost(up_gbps=50, memory_gbps=4800, tflops=400, arithmetic=False)
    a = torch.empty(16384, 16384, device=DEVICE, dtype=torch.bfloat16)
    takes(2 * 16384**3 / 400e9, lambda: a @ a)
    x = torch.empty(5000 * MB, device=DEVICE, dtype=torch.uint8)
    h = torch.empty(5000 * MB, dtype=torch.uint8, pin_memory=True)
    takes(100, lambda: x.copy_(h, non_blocking=True))


def rounded(size: int) -> int:
    """The allocator counts steps of 512 bytes."""
    return -(-size // 512) * 512


def test_memory_is_counted_until_it_is_freed() -> None:
    device = module()
    device.empty_cache()
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    large, small = rounded(20 * MB), rounded(10 * MB)
    a, b = torch.empty(small, device=DEVICE, dtype=torch.uint8), device_bytes(large)
    del a
    c = device_bytes(4 * MB)
    assert device.memory_allocated() - before == large + rounded(4 * MB)
    assert device.max_memory_allocated() - before == small + large
    device.reset_peak_memory_stats()
    assert device.max_memory_allocated() == device.memory_allocated()
    del b, c
    assert device.memory_allocated() == before
    assert device.memory_allocated(1) == 0 == device.max_memory_allocated(1)


def test_each_stream_has_a_pool_of_its_own() -> None:
    device, side = module(), torch.Stream(DEVICE)
    device.empty_cache()
    base = device.memory_reserved()
    for stream in (torch.accelerator.current_stream(), side):
        with on(stream):
            torch.empty(10 * MB, device=DEVICE, dtype=torch.uint8)
    assert device.memory_reserved() - base == 2 * rounded(10 * MB)
    device.empty_cache()
    assert device.memory_reserved() == base


def test_an_allocation_waits_for_other_streams_and_then_fails() -> None:
    device, side, size = module(), torch.Stream(DEVICE), rounded(20 * MB)
    home = torch.accelerator.current_stream()
    device.empty_cache()
    retries, failures = (device.memory_stats()[k] for k in ("num_alloc_retries", "num_ooms"))
    total = device.memory_reserved() + 25 * MB
    device.set_memory(total)
    try:
        assert device.mem_get_info() == (total - device.memory_reserved(), total)
        a = device_bytes(20 * MB)
        side.wait_stream(home)
        with on(side):
            device._sleep(1660 * 500_000)
            a.add_(1)
        used = side.record_event()
        a.record_stream(side)
        del a
        active = device.memory_stats()["active_bytes.all.current"]
        assert active - device.memory_allocated() == size
        assert not used.query()
        b = device_bytes(20 * MB)
        assert used.query()  # it has waited
        with pytest.raises(torch.OutOfMemoryError):
            device_bytes(20 * MB)
        del b
        device_bytes(20 * MB)
        stats = device.memory_stats()
        assert (stats["num_alloc_retries"], stats["num_ooms"]) == (retries + 2, failures + 1)
    finally:
        device.set_memory(0)


@pytest.mark.races_allowed
@pytest.mark.parametrize("waits", [True, False])
def test_two_accesses_that_nothing_orders_are_a_race_whatever_the_timing(waits: bool) -> None:
    device, side, x = module(), torch.Stream(DEVICE), torch.ones(8, device=DEVICE)
    device.clear_races()
    x.mul_(2)
    torch.accelerator.current_stream().synchronize() if waits else time.sleep(0.05)
    with on(side):
        y = x + 1
    found = [what for what, _, _ in device.races() if "mul" in what and "add" in what]
    assert bool(found) is not waits
    side.synchronize()
    assert y.tolist() == [3.0] * 8


def test_streams_are_counted() -> None:
    made = module().stream_count()
    torch.Stream(DEVICE)
    assert module().stream_count() == made + 1
