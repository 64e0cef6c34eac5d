"""A training script that overflows once, with save_overflow; its models are what replay is given.

python overflowing.py FOLDER KIND key=value ...    # settings
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BAD = 3
"""The micro-batch whose activations are too large: the second of the second window."""


class Net(nn.Module):
    """Dropout, a checkpoint, a buffer, tied weights, random numbers of Python's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.norm, self.head = nn.Dropout(0.25), nn.LayerNorm(8), nn.Linear(8, 1)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(8), persistent=False)

    def forward(self, x: Tensor, factor: float = 1.0, more: Any = None) -> dict[str, Tensor]:
        x = self.drop(self.first(x + self.shift)) * (1 + random.random() / 8)
        x = checkpoint(lambda y: self.drop(self.second(y)), x, use_reentrant=False)
        return {"logits": self.head(self.norm(x.float()) * factor), "last": x}


def net() -> nn.Module:
    torch.manual_seed(7)
    return Net()


def half() -> nn.Module:
    """A layer norm on a CPU takes no float16 parameters with float32 inputs."""
    model: Any = net().half()
    model.norm.float()
    return model


def other() -> nn.Module:
    model: Any = net()
    model.head = nn.Linear(8, 2)
    return model


def moved() -> nn.Module:
    """The same model with other numbers, but for what the file has."""
    torch.manual_seed(8)
    return Net()


def frozen() -> nn.Module:
    model: Any = net()
    model.norm.requires_grad_(False)
    return model


def sharp() -> nn.Module:
    """With vectors that each forward moves on."""
    model: Any = net()
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    )


def forwards(model: Any, kind: str, number: int, is_bad: bool) -> Tensor:
    if kind == "gpt2":
        ids = torch.randint(0, 32, (2, 8))
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        loss: Tensor = out.loss
        return loss * 1e4 if is_bad else loss
    factor = 1e6 if is_bad and kind != "outside" else 1.0
    x = torch.randn(4, 8, requires_grad=number % 2 == 1)
    out = model(x, factor=factor, more={"ids": [x, (1, None, "a")]})
    if kind == "outside":
        logits = out["logits"]
        return (logits.half() * 300).square().mean() if is_bad else logits.square().mean()
    return (out["logits"].float() - 1).square().mean() + out["last"].float().mean()


def main(folder: str, kind: str, *settings: str) -> None:
    """Four windows of two micro-batches."""
    from accelerate import Accelerator

    from accel_scaler import ScalerConfig, attach

    given: dict[str, Any] = dict(each.split("=") for each in settings)
    if "init_scale" in given:
        given["init_scale"] = float(given["init_scale"])
    if "fp32_modules" in given:
        given["fp32_modules"] = given["fp32_modules"].split(",")
    config = ScalerConfig(**{"init_scale": 64.0, "save_overflow": folder, **given})
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2), config
    )
    plain = globals()[kind if kind in globals() else "net"]()
    torch.manual_seed(3)
    random.seed(3)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    for number in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(forwards(model, kind, number, number == BAD))
            optimizer.step()
            optimizer.zero_grad()


def file_of_a_run(folder: Path) -> Path:
    """Of this script's net, made in this process."""
    from support import reset

    reset()
    main(str(folder / "out"), "net")
    reset()
    (path,) = (folder / "out").iterdir()
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
