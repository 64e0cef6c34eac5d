"""Two ranks under DDP with the asynchronous optimizer, raw and through an attached accelerator.

Not a test: ``test_async_ddp.py`` launches it and reads ``<folder>/rank<n>.pt``; with more
arguments (ports) it is the runs that fail.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs
from support import stock, use_torchs_products
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import (
    ACCUMULATION,
    CLIP,
    OVERFLOW,
    SCALER,
    WARMUP,
    WINDOWS,
    Watch,
    batch,
    control,
    copy,
    net,
    optimizer_of,
    ours,
    reference,
    schedule_of,
    slow_worker,
    state_of,
    weights,
)

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach
from accel_scaler.async_optimizer.replica import Replica

CASES = {
    "overlap": {"mode": "overlap"},
    "overlap offload": {"mode": "overlap", "offload": "cpu"},
    "sync": {"mode": "sync"},
    "late": {"mode": "sync"},
    "sync offload": {"mode": "sync", "offload": "cpu"},
    "delayed": {"mode": "delayed"},
    "delayed offload": {"mode": "delayed", "offload": "cpu"},
    "delayed warm": {"mode": "delayed", "warmup": WARMUP},
}
STALE_AFTER = {"delayed": 0, "delayed offload": 0, "delayed warm": WARMUP}
BUCKETS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    # One parameter a bucket: its gradient is all of the bucket's memory.
    "views, one each": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
    "copies": {"gradient_as_bucket_view": False},
}


def ddp(buckets: str) -> Any:
    return lambda model: DistributedDataParallel(model, **BUCKETS[buckets])


RAW: dict[tuple[str, str], list[str]] = {
    ("sgd", "views"): [case for case in CASES if case != "late"],
    ("sgd", "views, one each"): ["overlap", "delayed", "delayed offload"],
    ("sgd", "copies"): ["overlap", "delayed"],
    ("adamw", "views"): ["overlap", "delayed", "overlap offload"],
    ("fused", "views"): ["sync", "overlap"],
}
ATTACHED = {"sgd": list(CASES), "adamw": ["overlap", "delayed"]}


def raw(results: dict[str, Any], watch: Watch) -> None:
    for (kind, buckets), cases in RAW.items():
        wrap, name = ddp(buckets), f"{kind}, {buckets}"
        # torch's own fused step on a CPU is no reference
        for stale_after in {STALE_AFTER.get(case) for case in cases} if kind != "fused" else ():
            watch.take()
            result = reference(wrap, kind, stale_after=stale_after, look=4)
            result["collectives"] = watch.take()
            results[f"raw torch {stale_after}, {name}"] = result
        for case in cases:
            watch.take()
            with slow_worker(0.002):
                result = ours(wrap, kind, look=4, **CASES[case])  # type: ignore[arg-type]
            result["collectives"] = watch.take()
            results[f"raw {case}, {name}"] = result


def settings() -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": ACCUMULATION,
        "kwargs_handlers": [
            GradScalerKwargs(**SCALER),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    }


def attached(
    config: ScalerConfig | None, kind: str, stale_after: int | None = None, late: bool = False
) -> Any:
    """Through Accelerate; without ``config`` stock, on a copy of the parameters.

    ``late``: attached after ``prepare``, when a schedule has wrapped the optimizer's ``step``.
    """
    if config is None:
        accelerator = stock(**settings())
    else:
        plain = Accelerator(cpu=True, mixed_precision="fp16", **settings())
        accelerator = plain if late else attach(plain, config)
    layers, updates = net(), 0
    model = accelerator.prepare(layers)
    params = list(layers.parameters())
    held = params
    if config is None:
        held = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in params]
    inner = optimizer_of(kind, held)
    optimizer, schedule = accelerator.prepare(inner, schedule_of(inner))
    if late:
        attach(accelerator, config)
    result: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "scales": [], "rates": []}
    for window in range(WINDOWS):
        for index in range(ACCUMULATION):
            x, y = batch(window, index)
            with accelerator.accumulate(model):
                assert model.require_backward_grad_sync is (index == ACCUMULATION - 1)
                loss = nn.functional.mse_loss(model(x), y)
                result["losses"].append(float(loss.detach()))
                if (window, index, accelerator.process_index) == (OVERFLOW, 0, 1):
                    loss = loss * float("inf")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    for p, master in zip(params, held, strict=True):
                        if p is not master:
                            p.grad, master.grad = None, p.grad
                    norm = accelerator.clip_grad_norm_(held, CLIP)
                    result["norms"].append(float(norm))
                before = [p.detach().clone() for p in held] if config is None else []
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if config is None and accelerator.sync_gradients:
                    stale = stale_after is not None and updates >= stale_after
                    updates += not optimizer.step_was_skipped
                    copy(before if stale else held, params)
        result["skipped"].append(optimizer.step_was_skipped)
        result["scales"].append(accelerator.scaler.get_scale())
        result["rates"].append(schedule.get_last_lr()[0])
    if config is None:
        copy(held, params)
    result["state"], result["looks"] = state_of(optimizer), torch.zeros(0)
    result["weights"] = weights(accelerator.unwrap_model(model).parameters())
    result["scaler"] = accelerator.scaler.get_scale()
    assert isinstance(model, DistributedDataParallel)
    assert model.gradient_as_bucket_view
    detach(accelerator)
    return result


def through_accelerate(results: dict[str, Any], watch: Watch) -> None:
    for kind, cases in ATTACHED.items():
        for stale_after in {STALE_AFTER.get(case) for case in cases}:
            results[f"accelerate torch {stale_after}, {kind}"] = attached(None, kind, stale_after)
        for case in cases:
            case_settings: dict[str, Any] = CASES[case]
            config = ScalerConfig(
                step_mode=case_settings["mode"],
                offload=case_settings.get("offload", "none"),
                delay_warmup_steps=case_settings.get("warmup", 0),
                optimizer_threads=1,
            )
            watch.take()
            with slow_worker(0.002):
                result = attached(config, kind, late=case == "late")
            result["collectives"] = watch.take()
            results[f"accelerate {case}, {kind}"] = result


def fail(how: str) -> None:
    """Rank 1 ends in the middle of a run, while rank 0's optimizer thread is at work."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.set_num_threads(1)
    if how == "sharded":
        model: Any = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(net())
    inner = optimizer_of("sgd", model.parameters())
    optimizer = AsyncOptimizer(inner, model, scaler=(scaler := GradScaler("cpu", **SCALER)))
    step_part = Replica.step_part

    def broken(self: Replica, *args: Any) -> None:
        if how == "worker" and optimizer._stepper.steps == 3 and dist.get_rank() == 1:
            raise ArithmeticError("the kernel of rank 1 failed")
        time.sleep(0.2)
        step_part(self, *args)

    Replica.step_part = broken  # type: ignore[method-assign]
    for window in range(10):
        if window == 3 and how != "worker" and dist.get_rank() == 1:
            os._exit(3)
        x, y = batch(window, 0)
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("window", window, flush=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    use_torchs_products()
    results: dict[str, Any] = {}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator.num_processes == 2, "launched as lone processes, not as two ranks"
    watch = Watch()
    raw(results, watch)
    through_accelerate(results, watch)
    results["control"] = control(watch)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


FAILURES = ("exit", "sharded", "worker")


def fork_failures(folder: Path, ports: list[str]) -> str:
    """Two ranks for each way to fail, all at once; returns in each of them, with what it is.

    Forked, so that the imports are paid for once. Each writes to ``<how><rank>.txt``; the parent
    leaves their exit statuses (None: it hung, and was killed) in ``statuses.pt``.
    """
    running: dict[tuple[str, int], int] = {}
    for how, port in zip(FAILURES, ports, strict=True):
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                output = os.open(folder / f"{how}{rank}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
                return how
            running[how, rank] = pid
    end, statuses = time.monotonic() + 90, dict.fromkeys(running)
    while running and time.monotonic() < end:
        for key, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[key] = os.waitstatus_to_exitcode(status)  # type: ignore[assignment]
                del running[key]
        time.sleep(0.05)
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    torch.save(statuses, folder / "statuses.pt")
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 2:
        how = fork_failures(Path(sys.argv[1]), sys.argv[2:])
        if how:
            fail(how)
    else:
        main(Path(sys.argv[1]))
