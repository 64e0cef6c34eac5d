"""A raw Accelerate loop that knows nothing of accel_scaler. Not a test: tests launch it.

Each rank prints one JSON line of facts about its process and its training. With ``CALL_ATTACH``
in the environment it is a script that calls ``attach``, for comparison.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
import weakref
from contextvars import ContextVar
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from torch import nn


class Thing:
    """Something of ``__main__`` to pickle."""

    def __init__(self, value: str) -> None:
        self.value = value


def in_child(value: str) -> tuple[Thing, str]:
    """Runs in a process that multiprocessing spawned."""
    return Thing(value), type(Accelerator(mixed_precision="fp16")).__name__


def fail() -> None:
    raise ValueError("as planned")


def text_of_failure(call: Any) -> list[str]:
    """The files in the traceback of what ``call`` raises."""
    try:
        call()
    except ValueError:
        return [frame.filename for frame in traceback.extract_tb(sys.exc_info()[2])]
    raise AssertionError("nothing was raised")


def facts() -> dict[str, Any]:
    """All that a script may know of the way it was started."""
    main = sys.modules["__main__"]
    code = "import sys; print(sys.argv[1:], 'accelerate' in sys.modules, 'torch' in sys.modules)"
    return {
        "argv": sys.argv[1:],
        "argv0": sys.argv[0],
        "name": __name__,
        "file": __file__,
        "spec": main.__spec__ and main.__spec__.name,
        "package": main.__package__,
        "path": [entry for entry in sys.path if entry],
        "cwd": os.getcwd(),
        "flags": [sys.flags.isolated, sys.flags.no_site, sys.flags.ignore_environment],
        "thing": type(pickle.loads(pickle.dumps(Thing("x")))).__module__,
        "traceback": text_of_failure(fail),
        "child_process": subprocess.run(
            [sys.executable, "-c", code, "x"], capture_output=True, text=True, check=True
        ).stdout,
    }


class Held:
    """A value that each backward's copy of the context keeps alive."""


HELD: ContextVar[Held] = ContextVar("HELD")


def in_context(call: Any) -> Any:
    """Call it, and return its result once no copy of the context that it ran in is left.

    ``backward`` gives each collective of DDP a copy, which a thread of gloo drops late on a busy
    machine. torch aborts a process that ends meanwhile: "terminate called without an active
    exception" (pytorch#179291).
    """
    token = HELD.set(Held())
    held = weakref.ref(HELD.get())
    result = call()
    HELD.reset(token)
    for _ in range(1000):
        if held() is None:
            break
        time.sleep(0.01)
    return result


STEPS, BAD, BATCH = 6, 2, 8
"""The loss of step ``BAD`` is infinite, on the last rank only."""


def train() -> dict[str, Any]:
    """Train a little in fp16, the ranks on one batch; what there was and what came out."""
    torch.manual_seed(3)
    accelerator = Accelerator(kwargs_handlers=[GradScalerKwargs(growth_interval=2)])
    if "CALL_ATTACH" in os.environ:
        from accel_scaler import attach

        attach(accelerator)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.05))
    seen: list[str] = []
    layers[0].register_forward_hook(lambda module, args, out: seen.append(str(out.dtype)))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    skipped = []
    for step in range(STEPS):
        batch = torch.randn(BATCH, 8)[rank::ranks].to(accelerator.device)
        loss = model(batch).float().pow(2).mean()
        is_bad = step == BAD and rank == ranks - 1
        accelerator.backward(loss * (float("inf") if is_bad else 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    scaler = accelerator.scaler
    state = accelerator.unwrap_model(model).state_dict()
    result = {
        "class": type(accelerator).__name__,
        "kind": accelerator.distributed_type.value,
        "precision": accelerator.mixed_precision,
        "computed_in": sorted(set(seen)),
        "scale": scaler and scaler.get_scale(),
        "skipped": skipped,
        "weights": [value.tolist() for value in state.values()],
        "ranks": ranks,
        "settings": {k: v for k, v in os.environ.items() if k.startswith("ACCEL_SCALER_")},
    }
    accelerator.end_training()
    return result


def main() -> None:
    """Print the facts and the results, then end as the arguments say."""
    found = facts() | {"stdin": sys.stdin.read() if "--stdin" in sys.argv else ""}
    found["rank"], found["trained"] = int(os.environ.get("RANK", "0")), in_context(train)
    if "--spawn" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            thing, found["child_class"] = pool.apply(in_child, ("from the child",))
        found["child"] = [thing.value, type(thing).__module__]
    print("FACTS " + json.dumps(found), flush=True)
    if "--exit" in sys.argv:
        sys.exit(int(sys.argv[sys.argv.index("--exit") + 1]))


if __name__ == "__main__":
    main()
