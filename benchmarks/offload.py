"""Speed and memory with the optimizer's state in host memory, beside the same run without.

    python benchmarks/offload.py                              # on this machine's accelerator
    python benchmarks/offload.py --width 2048 --layers 19     # 1.06 billion parameters
    make bench-offload                                        # as three machines would

A model like GPT-2 with random tokens, AdamW, a clip in each step. Each cell is the speed of a run
without offload, and its peak memory: through the ring alone (``offload_budget=0``), beside backward
and forward (``"auto"``), and with half of the state kept on the device. On the simulated
accelerator bytes and operations take the time that the named machine would need, and nothing is
computed: its numbers are garbage, its times are not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from accel_scaler import attach, detach
from accel_scaler.selftest import sizes

LENGTH = 2048
"""Tokens in a sequence."""


WARM_UP = 4
"""Steps before the first timed one."""


class Machine(NamedTuple):
    """A machine to simulate."""

    memory: float
    """GB/s of the device's memory."""
    factor: float
    """By which all is slower, so that this machine's Python keeps up."""
    loads: Sequence[tuple[int, int]]
    """Micro-batches in a step, and tokens in each."""


MACHINES = {
    "T4": Machine(300, 1, [(8, 4096), (1, 4096), (1, 16384)]),
    "RTX 4090": Machine(1000, 3, [(8, 4096), (1, 4096), (1, 16384)]),
    "H200": Machine(4800, 8, [(8, 4096), (8, 16384), (1, 16384)]),
}


def costs(name: str) -> dict[str, float]:
    """The arguments of ``set_cost``: what a machine is assumed to do, slowed down."""
    assumed, machine = sizes.MACHINES[name], MACHINES[name]
    speeds = {
        "up_gbps": assumed.gbps,
        "down_gbps": assumed.gbps,
        "memory_gbps": machine.memory,
        "tflops": assumed.tflops,
    }
    return {key: speed / machine.factor for key, speed in speeds.items()}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention that keeps no weights, (batch, heads, length, 64)."""
    if hasattr(torch.get_device_module(q.device), "set_cost"):  # simulated: it has no other
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found: Tensor = flash(q, k, v, is_causal=True)[0]
        return found
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """A layer of GPT-2: attention and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = F.gelu(self.up(self.after(x)))
        return x + self.down(hidden)


class Model(nn.Module):
    """Embeddings, layers and a head that is the embedding."""

    def __init__(self, width: int, layers: int, vocabulary: int = 50304) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Cell(NamedTuple):
    """What one run measured."""

    seconds: float
    peak: int
    state: int
    """Bytes of state and masters."""


def run(
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    micro_batches: int,
    tokens: int,
    steps: int,
    **settings: Any,
) -> Cell:
    """Train; seconds are of the median step after the first ones."""
    module = torch.get_device_module(device)
    accelerator = Accelerator(gradient_accumulation_steps=micro_batches)
    attach(accelerator, **(settings or {"master_weights": "fp32"}))
    with torch.device(device):
        model = Model(*sizes).to(dtype)
        batch = torch.zeros(tokens // LENGTH, LENGTH, dtype=torch.long)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, inner)
    module.synchronize()
    module.reset_peak_memory_stats()
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        for _ in range(micro_batches):
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        float(loss.detach())  # as a script that logs it
        times.append(time.perf_counter() - start)
    peak, elements = module.max_memory_allocated(), sum(p.numel() for p in model.parameters())
    state = elements * (8 if dtype is torch.float32 else 12)
    detach(accelerator)
    del model, inner, optimizer, accelerator
    gc.collect()
    module.empty_cache()
    return Cell(statistics.median(times[WARM_UP:]), peak, state)


def line(
    device: str,
    dtype: torch.dtype,
    load: tuple[int, int],
    slower: float,
    args: argparse.Namespace,
) -> str:
    """One row of the table. ``slower``: the factor on all times."""

    def cell(**settings: Any) -> Cell:
        return run(device, dtype, (args.width, args.layers), *load, args.steps, **settings)

    base = cell()
    row = [
        f"{load[0]} x {load[1]:,}",
        f"{base.seconds / slower:.3f} s, {base.peak / 2**30:.1f} GiB",
    ]
    for budget in (0, "auto", base.state // 2):
        found = cell(offload="cpu", offload_budget=budget)
        row.append(f"{base.seconds / found.seconds:.2f} at {found.peak / base.peak:.2f}")
    return "  ".join(f"{each:>20}" for each in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--width", type=int, default=1280, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--weights", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=4, help="timed ones")
    parser.add_argument("--machine", nargs="*", choices=MACHINES, help="to simulate; default: all")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        parser.error("no accelerator: `make bench-offload` simulates three")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device, dtype = found.type, getattr(torch, args.weights)
    module: Any = torch.get_device_module(device)
    simulates = hasattr(module, "set_cost")
    real = {getattr(module, "get_device_name", lambda: device)(): MACHINES["H200"]}
    elements = 12 * args.width**2 * args.layers + (50304 + LENGTH) * args.width
    print(
        f"{elements / 1e9:.2f} billion parameters in {args.weights}: "
        "share of the speed at share of the peak memory"
    )
    names = ("micro-batches x tokens", "without offload", "ring alone", "auto", "half kept")
    for name, machine in (
        {each: MACHINES[each] for each in args.machine or MACHINES} if simulates else real
    ).items():
        slower = machine.factor if simulates else 1.0
        if simulates:
            module.set_cost(**costs(name), launch_us=3 * slower, arithmetic=False)
        print(f"\n{name}\n" + "  ".join(f"{each:>20}" for each in names), flush=True)
        for load in machine.loads:
            print(line(device, dtype, load, slower, args), flush=True)


if __name__ == "__main__":
    main()
