"""Short attached runs, what plain torch says of them, and their telemetry read with plain json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from support import reset
from torch import Tensor, nn

from accel_scaler import ScalerConfig, attach, detach

INF = float("inf")
Line = dict[str, Any]


def _forbid(literal: str) -> Any:
    raise ValueError(f"{literal} is not JSON")


def parse(text: str | bytes) -> Any:
    """Strict JSON: no NaN, no Infinity."""
    return json.loads(text, parse_constant=_forbid)


def lines_of(path: Path | str) -> list[Line]:
    """Every line of a file without broken ones."""
    data = Path(path).read_bytes()
    assert data.endswith(b"\n")
    return [parse(line) for line in data.splitlines()]


def kinds_of(path: Path | str) -> list[str]:
    """The kinds of the lines, apart from those with numbers of no window."""
    return [line["kind"] for line in lines_of(path) if line["kind"] != "noted"]


def noted_in(path: Path | str) -> dict[str, list[float]]:
    """The numbers that belong to no window, in order."""
    found: dict[str, list[float]] = {}
    for line in lines_of(path):
        for name, value in line["values"].items() if line["kind"] == "noted" else ():
            found.setdefault(name, []).append(value)
    return found


def windows_of(path: Path | str) -> list[Line]:
    """The window lines, with ``norms`` under the names of parameters."""
    names: list[str] = []
    found = []
    for line in lines_of(path):
        if line["kind"] == "start":
            names = []
        if line["kind"] == "names":
            names = line["names"]
        if line["kind"] != "window":
            continue
        if "norms" in line:
            line["norms"] = dict(zip(names, map(float, line["norms"]), strict=True))
        found.append(line)
    return found


@contextmanager
def attached(
    path: Path | None = None,
    precision: str = "fp16",
    accumulation: int = 1,
    dynamo_plugin: Any = None,
    **settings: Any,
) -> Iterator[Any]:
    """A fresh attached accelerator, detached at the end, so that its file is complete."""
    reset()
    telemetry = None if path is None else str(path)
    defaults: dict[str, Any] = {"telemetry": telemetry}
    if precision == "fp16":
        defaults["init_scale"] = 2.0**12
    accelerator: Any = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        dynamo_plugin=dynamo_plugin,
    )
    attach(accelerator, ScalerConfig(**(defaults | settings)))
    try:
        yield accelerator
    finally:
        if accelerator.scaler is not None:
            accelerator.scaler.abandon_window()  # detach would raise, and hide an error
        detach(accelerator)


def batch(number: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """For models from 8 numbers to 1."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)


def loss_of(model: Any, number: int) -> Tensor:
    x, y = batch(number)
    return (model(x).float() - y).square().mean()


def sgd(params: Any, **more: Any) -> torch.optim.Optimizer:
    """Its momentum shows a lost step for long."""
    return torch.optim.SGD(params, **({"lr": 0.1, "momentum": 0.9} | more))


class Beside:
    """Plain torch, beside an attached loop: looks at the same gradients and says what is right."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], growth_interval: int) -> None:
        self.named, self.growth_interval = list(named), growth_interval
        self.scale = torch.full((1,), 2.0**12)
        self.tracker = torch.zeros(1, dtype=torch.int32)
        self.expected: list[Line] = []

    def look(self, max_norm: float, rates: Sequence[float]) -> None:
        """Call before the clip: the gradients are scaled, and accumulated."""
        scale = float(self.scale)
        grads = {n: p.grad.float() / scale for n, p in self.named if p.grad is not None}
        bad = not all(bool(g.isfinite().all()) for g in grads.values())
        found, rule = torch.full((1,), float(bad)), (2.0, 0.5, self.growth_interval)
        torch._amp_update_scale_(self.scale, self.tracker, found, *rule)
        line: Line = {
            "scale": scale,
            "next_scale": float(self.scale),
            "growth_tracker": int(self.tracker),
            "found_inf": bad,
            "skipped": bad,
            "lr": list(rates),
        }
        if not bad:
            total = float(nn.utils.get_total_norm(list(grads.values())))
            line |= {
                "norms": {n: float(f"{float(g.norm()):.6g}") for n, g in grads.items()},
                "grad_norm": total,
                "max_norm": max_norm,
                "clip_coefficient": min(1.0, max_norm / (total + 1e-6)),
            }
        self.expected.append(line)

    def assert_tells(self, path: Path) -> list[Line]:
        """The file says what plain torch says, bit for bit where no clip rounds."""
        found = windows_of(path)
        assert [line["step"] for line in found] == list(range(len(self.expected)))
        for line, expected in zip(found, self.expected, strict=True):
            for key, value in expected.items():
                if key == "clip_coefficient":
                    assert math.isclose(line[key], value, rel_tol=1e-6), (line["step"], key)
                else:
                    assert line[key] == value, (line["step"], key, line[key], value)
        return found
