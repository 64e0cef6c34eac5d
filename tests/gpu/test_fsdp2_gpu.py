"""Accelerate's own FSDP2 path, which it offers on accelerators only.

Launched as a script (see the end of the file) it is one rank of the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from children import RANKS, free_port
from torch import nn
from two_ranks import CLIP, OVERFLOW, SCALER, WINDOWS, batch, net, schedule_of, weights

from accel_scaler import ScalerConfig, attach, detach

pytestmark = [
    pytest.mark.usefixtures("real_device"),
    pytest.mark.skipif(torch.accelerator.device_count() < RANKS, reason="needs two devices"),
]

CASES: dict[str, dict[str, Any]] = {
    "sync": {"step_mode": "sync"},
    "overlap": {"step_mode": "overlap"},
    "offload": {"offload": "cpu"},
}


def train(config: ScalerConfig | None) -> dict[str, Any]:
    """One run on this rank's rows; without ``config`` stock Accelerate."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
        ),
        kwargs_handlers=[GradScalerKwargs(**SCALER)],
    )
    if config is not None:
        attach(accelerator, config)
    layers = net().requires_grad_(True)
    inner = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(layers, inner)
    schedule = accelerator.prepare(schedule_of(optimizer))
    result: dict[str, Any] = {"losses": [], "skipped": [], "scales": [], "rates": []}
    for window in range(WINDOWS):
        x, y = (t.to(accelerator.device) for t in batch(window, 0))
        loss = nn.functional.mse_loss(model(x).float(), y)
        result["losses"].append(float(loss.detach()))
        if (window, accelerator.process_index) == (OVERFLOW, RANKS - 1):
            loss = loss * float("inf")
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result["skipped"].append(optimizer.step_was_skipped)
        result["scales"].append(accelerator.scaler.get_scale())
        result["rates"].append(schedule.get_last_lr()[0])
    if config is not None:
        optimizer.synchronize()
    result["weights"] = weights(model.parameters()).cpu()
    if config is not None:
        detach(accelerator)
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp2_gpu")
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", *launch, "--main_process_port", str(free_port())),
            *(__file__, str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_each_case_beside_stock_accelerate(ranks: list[dict[str, Any]], case: str) -> None:
    """On the device bit for bit; the optimizer on the host may round otherwise."""
    for rank in ranks:
        mine, stock = rank[case], rank["stock"]
        assert mine["skipped"] == [window == OVERFLOW for window in range(WINDOWS)]
        assert (mine["scales"], mine["rates"]) == (stock["scales"], stock["rates"])
        exact = {"rtol": 1e-2, "atol": 1e-3} if case == "offload" else {"rtol": 0.0, "atol": 0.0}
        for key in ("losses", "weights"):
            torch.testing.assert_close(mine[key], stock[key], **exact)
    assert torch.equal(ranks[0][case]["weights"], ranks[1][case]["weights"])


def main(folder: Path) -> None:
    results = {"stock": train(None)}
    results |= {case: train(ScalerConfig(**settings)) for case, settings in CASES.items()}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
