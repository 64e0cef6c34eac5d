"""benchmarks/gpu.py without a GPU: its table, its search, its processes, and our own variants."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from versions import before_torch

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = str(ROOT / "benchmarks")
TINY = {"layers": 2, "width": 16, "heads": 2, "vocab": 32, "length": 8, "batch": 2}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    sys.path.insert(0, FOLDER)
    try:
        import gpu

        yield gpu
    finally:
        sys.path.remove(FOLDER)
        for name in ("gpu", "peers"):
            sys.modules.pop(name, None)


def job_of(gpu: Any, accumulation: int) -> Any:
    return gpu.Job(gpu.Shape(**TINY), "cpu", accumulation)


def trained(gpu: Any, name: str, accumulation: int, windows: int = 4) -> torch.Tensor:
    """The weights that a variant comes to on the same few windows."""
    job = job_of(gpu, accumulation)
    loop = gpu.VARIANTS[name].set_up(job)
    seeded = torch.Generator().manual_seed(1)
    for _ in range(windows):
        size = (accumulation, job.shape.batch, job.shape.length)
        loop.window(list(torch.randint(job.shape.vocab, size, generator=seeded)))
    loop.finish()
    return torch.cat([p.detach().flatten().float() for p in loop.model.parameters()])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_variant_of_ours_trains_as_stock_does(gpu: Any, accumulation: int) -> None:
    stock = trained(gpu, "stock", accumulation)
    start = sys.modules["peers"].model_of(job_of(gpu, 1), torch.float32)
    before = torch.cat([p.detach().flatten() for p in start.parameters()])
    assert not torch.equal(stock, before)
    assert torch.equal(trained(gpu, "sync", accumulation), stock)
    # Unscaling and clipping inside the kernel may cost one rounding.
    torch.testing.assert_close(trained(gpu, "overlap", accumulation), stock, rtol=1e-4, atol=1e-7)
    half = trained(gpu, "offload+sync", accumulation)
    other = trained(gpu, "offload+overlap", accumulation)
    torch.testing.assert_close(other, half, rtol=1e-3, atol=1e-6)
    # One step behind: what it shows after as many steps, and a last one published by detach.
    late = trained(gpu, "offload+delayed", accumulation)
    assert late.shape == half.shape
    assert not torch.equal(late, half)
    assert bool(late.isfinite().all())


def test_the_table_has_ratios_of_medians(gpu: Any) -> None:
    gib = 2**30
    results = [
        gpu.Result("stock", 4, [1.0, 9.0], [0.5], 8 * gib),
        gpu.Result("stock", 4, [2.0], [0.5], 9 * gib),  # another round: median 2
        gpu.Result("sync", 4, [2.0], [1.25], 8 * gib),
        gpu.Result("overlap", 4, [1.6], [], 10 * gib),
        gpu.Result("offload+sync", 4, error="out of memory"),
        gpu.Result("offload+overlap", 4, [4.0], [], gib),
    ]
    names = ["stock", "sync", "overlap", "offload+sync", "offload+overlap"]
    rows = {row.name: row for row in gpu.rows_of(results, names, tokens=800)}
    assert (rows["stock"].tokens, rows["stock"].to_stock, rows["stock"].peak) == (400, 1.0, 9.0)
    assert rows["sync"].gain is None
    assert rows["overlap"].to_stock == pytest.approx(1.25)
    assert rows["overlap"].gain == pytest.approx(1.25)
    assert rows["overlap"].ceiling == pytest.approx(2.0 / 1.25)
    assert (rows["offload+sync"].tokens, rows["offload+sync"].remark) == (None, "out of memory")
    assert rows["offload+overlap"].gain is None
    assert rows["offload+overlap"].to_stock == 0.5
    lines = gpu.show(list(rows.values())).splitlines()
    assert lines[3].split() == ["overlap", "500", "1.25", "10.00", "1.25", "1.60"]


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
def test_a_process_of_its_own_measures_one_variant(gpu: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(FOLDER).parent))
    options = [f"--{key}={value}" for key, value in TINY.items()]
    args = gpu.parse(["--device=cpu", "--threads=1", "--windows=1", "--blocks=1", *options])
    first, second = gpu.start(args, "fsdp2", accumulation=[1, 2])
    assert (first.error, second.error) == ("", "")
    assert (first.accumulation, second.accumulation) == (1, 2)
    assert first.threads == "1"
    assert len(second.seconds) == 1
