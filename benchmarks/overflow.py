"""The cost of finding where an overflow began: whole windows, forward to step.

    python benchmarks/overflow.py            # about two minutes on two cores

A small GPT-2, whose loss is its own, and the same without a loss, in turn in one process: with
find_overflow off, off once more (how far two equal variants differ here), replay, always, and
on_overflow retry. A window without overflow comes first, then a window that overflows in the last
layer's backward and is skipped: there `replay` runs it once more, which is done at the first skip
of a run and one in a hundred. With `retry` it overflows once, runs again at half the scale, and
steps; its ratio is to a window without overflow. Ratios of medians.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from accel_scaler import ScalerConfig, attach

VARIANTS = ("off", "again", "replay", "always", "retry")
WORDS, BATCH, LENGTH = 256, 4, 64


class Run:
    """One accelerator with its model."""

    def __init__(self, finds: str, inside: bool) -> None:
        torch.manual_seed(0)
        sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
        ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
        plain = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **ends))
        self.retries, self.is_armed = finds == "retry", False
        wish: Any = finds if finds in ("replay", "always") else "off"
        config = ScalerConfig(
            init_scale=2.0**10,
            growth_interval=10**6,
            find_overflow=wish,
            on_overflow="retry" if self.retries else "skip",
        )
        hook: Any = self.overflow_once
        plain.transformer.ln_f.weight.register_hook(hook)
        self.accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(plain, optimizer)
        self.inside = inside
        self.batch = torch.randint(0, WORDS, (BATCH, LENGTH))

    def overflow_once(self, grad: Tensor) -> Tensor:
        armed, self.is_armed = self.is_armed, False
        return torch.full_like(grad, float("inf")) if armed else grad

    def loss(self) -> Tensor:
        if self.inside:
            loss: Tensor = self.model(input_ids=self.batch, labels=self.batch).loss
            return loss
        logits = self.model(input_ids=self.batch).logits[:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, WORDS), self.batch[:, 1:].reshape(-1)
        )

    def window(self, factor: float) -> float:
        """Seconds of one window; a large factor makes its backward overflow."""
        if factor > 1 and self.retries:
            self.is_armed, factor = True, 1.0
        start = time.perf_counter()
        self.accelerator.backward(self.loss() * factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        took = time.perf_counter() - start
        self.accelerator.scaler.update(2.0**10)  # it is at its first scale again
        return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=40, help="timed turns (default: 40)")
    args = parser.parse_args()
    for name in ("accel_scaler", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)  # of skips, which are meant
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'loss':<9}{'window':<9}{'off ms':>8}" + "".join(f"{n:>9}" for n in VARIANTS[1:]))
    for inside in (True, False):
        runs = {name: Run(name, inside) for name in VARIANTS}
        plain = 0.0
        for factor, label in ((1.0, "step"), (1e9, "skip")):
            times: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for turn in range(args.repeats + 2):
                for name in VARIANTS[turn % 5 :] + VARIANTS[: turn % 5]:
                    took = runs[name].window(factor)
                    if factor > 1:
                        runs[name].window(1.0)  # so that each is the first skip of a run
                    if turn >= 2:
                        times[name].append(took)
            median = {name: statistics.median(values) for name, values in times.items()}
            plain = plain or median["off"]
            beside = dict.fromkeys(VARIANTS, median["off"]) | {"retry": plain}
            ratios = "".join(f"{median[name] / beside[name]:>9.3f}" for name in VARIANTS[1:])
            where = "inside" if inside else "outside"
            print(f"{where:<9}{label:<9}{median['off'] * 1e3:>8.2f}{ratios}", flush=True)


if __name__ == "__main__":
    main()
