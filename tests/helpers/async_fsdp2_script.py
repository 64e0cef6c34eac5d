"""Two ranks of torch's FSDP2 on a CPU mesh with the asynchronous optimizer.

Not a test: ``test_async_fsdp2.py`` launches it and reads ``<folder>/rank<n>.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from two_ranks import (
    CLIP,
    SCALER,
    WARMUP,
    Watch,
    batch,
    control,
    net,
    optimizer_of,
    ours,
    reference,
    slow_worker,
    state_of,
    weights,
)

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.errors import UnsupportedError

CASES: dict[str, dict[str, Any]] = {
    "overlap": {"mode": "overlap"},
    "overlap offload": {"mode": "overlap", "offload": "cpu"},
    "sync": {"mode": "sync"},
    "sync offload": {"mode": "sync", "offload": "cpu"},
    "delayed": {"mode": "delayed"},
    "delayed offload": {"mode": "delayed", "offload": "cpu"},
    "delayed warm": {"mode": "delayed", "warmup": WARMUP},
    "overlap backwards": {"mode": "overlap", "order": lambda params: params[::-1]},
    "overlap reduced": {"mode": "overlap", "hold_back": False},
}
STALE_AFTER = {"delayed": 0, "delayed offload": 0, "delayed warm": WARMUP}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: Any, *, prefetch: int = 0, root: bool = True, **kwargs: Any) -> Any:
    """Each block and the head a group, the rest the root's; ``prefetch`` so many blocks ahead.

    What the root gathers is updated first, or its wait would be one for all.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.blocks, model.head):
        fully_shard(block, mesh=mesh, **kwargs)
    if root:
        fully_shard(model, mesh=mesh, **kwargs)
    blocks = list(model.blocks)
    for place, block in enumerate(blocks[:-1] if prefetch else ()):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + prefetch])
    if prefetch and root:
        model.set_modules_to_forward_prefetch(blocks[:prefetch])
    return model


def shard_together(model: Any) -> Any:
    """The first and the last block are one group: both are gathered where the first is used."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard([model.blocks[0], model.blocks[2]], mesh=mesh)
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {
    "resharded": partial(shard, reshard_after_forward=True),
    "kept": partial(shard, reshard_after_forward=False),
    "prefetched": partial(shard, reshard_after_forward=True, prefetch=1),
    "prefetched far, kept": partial(shard, reshard_after_forward=False, prefetch=2),
    "together": shard_together,
    "bf16": partial(shard, mp_policy=BF16),
    "plain root": partial(shard, root=False),
}
ALWAYS = ["overlap", "delayed"]
RUNS: dict[tuple[str, str], list[str]] = {
    ("sgd", "resharded"): list(CASES),
    **{("sgd", layout): ALWAYS for layout in ("kept", "prefetched", "together", "plain root")},
    **{("sgd", layout): ["overlap"] for layout in ("prefetched far, kept", "bf16")},
    ("adamw", "resharded"): ["overlap", "delayed offload"],
    ("fused", "resharded"): ["sync", "overlap"],
}


def reference_key(kind: str, layout: str, case: str) -> str:
    """Where the reference of a run is kept; how gradients are reduced is part of it."""
    if kind == "fused":  # torch's own fused step on a CPU is no reference
        return f"sync, fused, {layout}"
    way = next((way for way in (" reduced", " backwards") if case.endswith(way)), "")
    return f"torch {STALE_AFTER.get(case)}{way}, {kind}, {layout}"


def train(results: dict[str, Any], watch: Watch) -> None:
    for (kind, layout), cases in RUNS.items():
        # torch cannot unscale or clip sharded and plain gradients together
        common: dict[str, Any] = {"look": 4, "scaled": layout != "plain root"}
        for case in cases:
            key, settings = reference_key(kind, layout, case), common | CASES[case]
            if key.startswith("torch") and key not in results:
                wanted = {
                    k: v
                    for k, v in settings.items()
                    if k in ("look", "scaled", "hold_back", "order")
                }
                watch.take()
                results[key] = reference(
                    LAYOUTS[layout], kind, stale_after=STALE_AFTER.get(case), **wanted
                )
                results[key]["collectives"] = watch.take()
            watch.take()
            with slow_worker(0.002):
                result = ours(LAYOUTS[layout], kind, **settings)
            result["collectives"] = watch.take()
            results[f"{case}, {kind}, {layout}"] = result


def step(model: Any, optimizer: Any, scaler: Any, window: int) -> None:
    """One boundary, torch's or ours."""
    x, y = batch(window, 0)
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    if isinstance(optimizer, AsyncOptimizer):
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def make(kind: str, case: str | None) -> tuple[Any, Any, Any]:
    """Model, optimizer and scaler; torch's without ``case``."""
    model = shard(net())
    inner = optimizer_of(kind, model.parameters())
    if case is None:
        return model, inner, torch.amp.GradScaler("cpu", **SCALER)
    scaler = GradScaler("cpu", **SCALER)
    return model, AsyncOptimizer(inner, model, scaler=scaler, **CASES[case]), scaler


def checkpoint(model: Any, optimizer: Any, full: bool) -> tuple[Any, Any]:
    options = StateDictOptions(full_state_dict=full)
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )


def resume(kind: str, first: str | None, second: str | None, full: bool) -> dict[str, Any]:
    """Two steps with ``first``, two with ``second``, a checkpoint between them."""
    model, optimizer, scaler = make(kind, first)
    with slow_worker(0.002):
        for window in range(2):
            step(model, optimizer, scaler, window)
        saved, saved_optimizer = checkpoint(model, optimizer, full)
        if first is not None:
            optimizer.close()
        kinds = {
            type(t).__name__ for entry in saved_optimizer["state"].values() for t in entry.values()
        }
        tensors = [(name, t) for name, t in sorted(saved.items())]
        entries = [
            (f"{name}.{key}", t)
            for name, entry in sorted(saved_optimizer["state"].items())
            for key, t in sorted(entry.items())
        ]
        model, optimizer, scaler = make(kind, second)
        options = StateDictOptions(full_state_dict=full)
        set_model_state_dict(model, saved, options=options)
        set_optimizer_state_dict(model, optimizer, saved_optimizer, options=options)
        for window in range(2, 4):
            step(model, optimizer, scaler, window)
        state = state_of(optimizer)
        if second is not None:
            optimizer.close()
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors}
    whole |= {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in entries}
    return {
        "saved": {name: t.detach().clone() for name, t in whole.items()},
        "kinds": kinds,
        "weights": weights(model.parameters()),
        "state": state,
    }


CHANGES: list[tuple[str, str | None, str | None, bool]] = [
    ("sgd", "overlap", None, False),
    ("sgd", None, "overlap", False),
    ("adamw", "overlap", "overlap", False),
    ("adamw", "overlap offload", None, True),
    ("adamw", None, "overlap offload", True),
    ("sgd", "sync offload", "overlap", False),
]


def refusals() -> dict[str, str]:
    """What each of these says."""
    from transformers.optimization import Adafactor as TransformersAdafactor

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()

    makers: dict[str, Callable[[Any], Any]] = {
        "Adafactor": lambda params: torch.optim.Adafactor(params),
        "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
        "transformers": lambda params: TransformersAdafactor(params),
        "own": lambda params: Own(params),
    }
    said = {}
    for name, maker in makers.items():
        for mode in ("overlap", "delayed"):
            model = shard(net())
            inner = maker(list(model.parameters()))
            for attempt in (1, 2):  # a refusal leaves the optimizer as it was
                try:
                    AsyncOptimizer(inner, model, mode=mode).close()
                except Exception as error:
                    said[f"{name} {mode} {attempt}"] = f"{type(error).__name__}: {error}"
    model, scaler = shard(net().half()), GradScaler("cpu", **SCALER)
    inner = optimizer_of("sgd", model.parameters())
    with AsyncOptimizer(inner, model, scaler=scaler) as optimizer:
        x, y = batch(0, 0)
        scaler.scale(nn.functional.mse_loss(model(x.half()), y.half())).backward()
        try:
            optimizer.step()
        except UnsupportedError as error:
            said["half"] = str(error)
    return said


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2, "launched as a lone process"
    results: dict[str, Any] = {}
    watch = Watch()
    train(results, watch)
    for kind, first, second, full in CHANGES:
        results[f"{first} to {second}, {kind}"] = resume(kind, first, second, full)
        results[f"stock {full}, {kind}"] = resume(kind, None, None, full)
    for kind in ("sgd", "adamw"):
        run = reference(LAYOUTS["resharded"], kind, look=4, kind_of_scaler=GradScaler)
        results[f"plain loop, {kind}"] = run
    results["refused"] = refusals()
    results["control"] = control(watch)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
