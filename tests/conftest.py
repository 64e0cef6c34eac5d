"""Fixtures for every test: nothing may leak, no state may be shared, nothing is downloaded."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from accel_scaler.optimizer_step import replica

# Tests that leave a thread end with a full collection; what was imported need not be walked.
gc.freeze()

# What libraries set for the process on their own; a test of ours does not touch them.
NOT_OURS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "HYPOTHESIS_", "CUDA_MODULE_LOADING")
BESIDE_TORCH = (
    *("gpu", "integration", "property", "stress", "system/distributed", "system/plugin"),
    *("unit/async_optimizer", "unit/integrations", "unit/optimizer_step"),
)
"""Folders whose references are torch's own float16 products."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, a setting or an environment variable behind."""
    threads = set(threading.enumerate())
    environment, interval = dict(os.environ), sys.getswitchinterval()
    yield
    end = time.monotonic() + 5
    while time.monotonic() < end:
        left = [t for t in set(threading.enumerate()) - threads if "accel_scaler" in t.name]
        if not left:
            break
        gc.collect()  # an optimizer thread ends with its optimizer, which a step in hand keeps
        left[0].join(timeout=0.1)
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(timeout=5)
    leaked = [
        t.name
        for t in set(threading.enumerate()) - threads
        # For the process: tqdm's one monitor; of torch 2.6 its compiler's reader; autograd's, where
        # a finalizer ran
        if t.is_alive() and type(t).__name__ not in ("TMonitor", "_DummyThread")
        if "(_read_thread)" not in t.name
    ]
    changed = {
        key
        for key in environment.keys() | os.environ.keys()
        if environment.get(key) != os.environ.get(key) and not key.startswith(NOT_OURS)
    }
    for key in changed:
        if key in environment:
            os.environ[key] = environment[key]
        else:
            del os.environ[key]
    assert not leaked, f"threads left running: {leaked}"
    left = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    assert left == interval, f"the switch interval was {interval} and is {left}"
    # Accelerate itself writes ACCELERATE_* and MASTER_* on construction.
    ours = {key for key in changed if not key.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))}
    assert not ours, f"environment variables changed: {ours}"


@pytest.fixture(autouse=True)
def fresh_accelerate_state() -> Iterator[None]:
    """Accelerate's state is shared by the whole process; give each test its own."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """``overlap`` steps as ``sync`` once anything was compiled in the process."""
    yield
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and dynamo.FRAME_COUNTER:
        torch._dynamo.reset()


@pytest.fixture
def torchs_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No emulated float16 products, for references that torch computes.

    Where the processor has no float16 kernels, ours round otherwise than torch's.
    """
    monkeypatch.setattr("accel_scaler.integrations.cpu_float16.has_float16_kernels", lambda: True)


@pytest.fixture(autouse=True)
def references_of_torch(request: pytest.FixtureRequest) -> None:
    if request.path.relative_to(Path(__file__).parent).as_posix().startswith(BESIDE_TORCH):
        request.getfixturevalue("torchs_own_products")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors: a team of threads on a busy machine spends its time waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each parameter, as in a model of a useful size."""
    monkeypatch.setattr(replica, "SMALLEST_PART", 1)
    monkeypatch.setattr(replica, "PARTS", 1 << 30)
