"""What changes a model's numbers and is no part of it: versions, device, switches of torch."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..devices import device_name
from ..version import __version__

PACKAGES = ("torch", "accelerate", "transformers", "numpy", "peft")

MOST_THREADS = 1024


def surroundings(device: torch.device) -> dict[str, Any]:
    """Texts, numbers and switches, by what a person calls them. Does not synchronise."""
    found: dict[str, Any] = {"accel_scaler": __version__, "python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    found["device"] = device.type
    if device.type == "cpu":
        found["device name"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        asks = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
        found["float16 instructions"] = asks is None or bool(asks())
    else:
        found["device name"] = device_name(device)
    return found | {name: read() for name, (read, _) in _switches().items()}


@contextmanager
def as_then(about: Mapping[str, Any]) -> Iterator[None]:
    """Within the block torch's switches are as :func:`surroundings` has told of them."""
    changed = []
    try:
        for name, (read, write) in _switches().items():
            value: Any = about.get(name)
            before = read()
            if type(value) is not type(before) or value == before:
                continue
            if name == "threads" and not 0 < value <= MOST_THREADS:
                continue
            if type(value) is str and value not in ("highest", "high", "medium"):
                continue
            changed.append((write, before))
            write(value)
        yield
    finally:
        for write, before in reversed(changed):
            write(before)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _switches() -> dict[str, Any]:
    """``(read, write)`` of each."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "float32 products": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        "float16 sums": _attribute(cuda, "allow_fp16_reduced_precision_reduction"),
        "TF32 convolutions": _attribute(cudnn, "allow_tf32"),
        "tuned convolutions": _attribute(cudnn, "benchmark"),
    }


def _attribute(holder: Any, name: str) -> tuple[Any, Any]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)
