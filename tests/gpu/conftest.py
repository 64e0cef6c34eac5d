"""Every test of this folder runs on the device that ``accelerators`` finds, or is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerators import DEVICE, MISSING, has, is_simulated, synchronize


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """The device under test."""
    if MISSING:
        pytest.skip(MISSING)
    return DEVICE


@pytest.fixture(autouse=True)
def finished(device: str) -> object:
    """The tasks that a test has enqueued do not run into the next test."""
    yield
    synchronize()


@pytest.fixture(scope="session")
def real_device(device: str) -> None:
    """For what only real kernels, their allocator or their launches can show."""
    if is_simulated():
        pytest.skip(f"{device} is not one of torch's own backends: no such kernels or counters")


@pytest.fixture(scope="session")
def sync_counter(device: str) -> None:
    """Needs a backend that can warn of each synchronisation."""
    if not has("set_sync_debug_mode"):
        pytest.skip(f"{device}: its module cannot warn of synchronisations")


@pytest.fixture(scope="session")
def memory_counter(device: str) -> None:
    """Needs a torch that counts any accelerator's memory: 2.9 is the first."""
    if not hasattr(torch.accelerator, "max_memory_allocated"):
        pytest.skip("torch.accelerator counts no memory")
