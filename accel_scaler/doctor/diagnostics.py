"""What would go wrong in a launch as a :class:`Survey` found it, and what attaching mends in it.

F1 to F12 are the faults of the README's table. How each is known: F1 to F5, F7, F9 and F11 by
precision and device, "if the script has..."; F6 by the two; F8 and F10 by asking torch's kernel
itself; F12 by the threads the launcher will set. F13 is a fault of scalers that defer the step and
know nothing of Accelerate: no argument or file shows one, so it is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version

from ..errors import ConfigError
from ..telemetry import check_path
from .environment import Survey

__all__ = ["LOWEST", "Hazard", "hazards", "mended", "telemetry_trouble"]

LOWEST = {"torch": "2.6", "accelerate": "1.10", "transformers": "4.56"}
"""As pyproject.toml has them."""


@dataclass(frozen=True)
class Hazard:
    """One thing that can go wrong."""

    id: str
    """"F1" to "F12", or a word; does not change."""
    text: str
    """One line for people."""


@dataclass(frozen=True)
class Fault:
    """A fault of the stock stack, and which launches meet it."""

    id: str
    what: str
    """In a few words."""
    text: str
    is_met: Callable[[Survey], bool]


def hazards(found: Survey) -> list[Hazard]:
    """Everything that this launch would meet; those with a number first."""
    open_faults = [] if found.attached else [Hazard(f.id, f.text) for f in _met(found)]
    return [*open_faults, *_streak(found), *_starved(found), *_others(found)]


def mended(found: Survey) -> list[Hazard]:
    """What it would meet under stock Accelerate, and does not, because it is attached."""
    if not found.attached:
        return []
    those = [Hazard(fault.id, fault.what) for fault in _met(found) if fault.id != "F11"]
    if not _starved(found) and _one_thread(found) and _thread_steps_on_cpu(found):
        those.append(Hazard("F12", "OMP_NUM_THREADS=1"))
    return those


def _met(found: Survey) -> list[Fault]:
    return [fault for fault in FAULTS if fault.is_met(found)]


def _fp16_device(found: Survey) -> bool:
    """Stock Accelerate has a scaler."""
    return found.fp16 and not found.on_cpu


def _fp16_cpu(found: Survey) -> bool:
    return found.fp16 and found.on_cpu


def kernel_applies_found_inf_2() -> bool:
    """F8, asked of this torch: does its fused CPU kernel step although ``found_inf`` is 2?"""
    one, two = torch.tensor(1.0, device="cpu"), torch.tensor(2.0, device="cpu")
    param = _sgd(torch.ones(2, 2, device="cpu"), grad_scale=one, found_inf=two)
    return bool((param != 1).any())


def kernel_ignores_strides() -> bool:
    """F10, asked of this torch: does a transposed gradient step its parameter wrongly?"""
    grad = torch.arange(4.0, device="cpu").view(2, 2).t()
    return not torch.equal(_sgd(grad), _sgd(grad.contiguous()))


def _sgd(grad: torch.Tensor, **scaling: torch.Tensor) -> torch.Tensor:
    """Ones, shape (2, 2), after one step; without an optimizer, whose first costs seconds."""
    param = torch.ones(2, 2, device="cpu")
    settings: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1.0, "dampening": 0.0}
    settings |= {"nesterov": False, "maximize": False, "is_first_step": False, **scaling}
    torch._fused_sgd_([param], [grad], [], **settings)
    return param


FAULTS = [
    Fault(
        "F1",
        "fused optimizers",
        "if the optimizer is fused (the Trainer's default), step_was_skipped stays False on a "
        "skipped step, and the LR schedule moves",
        _fp16_device,
    ),
    Fault(
        "F2",
        "two optimizers and clipping",
        "if the script has two optimizers and clips, the second one's gradients are unscaled twice",
        _fp16_device,
    ),
    Fault(
        "F3",
        "two optimizers, one overflow",
        "if the script has two optimizers and the first overflows, the second is unscaled by the "
        "halved scale",
        _fp16_device,
    ),
    Fault(
        "F4",
        "two optimizers, two updates of the scale",
        "if the script has two optimizers, growth and back-off of the scale count twice",
        _fp16_device,
    ),
    Fault(
        "F5",
        "clipping under accumulation",
        "if the script accumulates and clips on every micro-batch, it raises, or mixes scaled and "
        "unscaled gradients",
        _fp16_device,
    ),
    Fault(
        "F6",
        "fp16 on the CPU",
        "fp16 on the CPU: without attach there is neither autocast nor a scaler; it trains in fp32 "
        "without a word",
        _fp16_cpu,
    ),
    Fault(
        "F7",
        "fp16 weights",
        'if the model\'s weights are float16: "Attempting to unscale FP16 gradients."',
        _fp16_device,
    ),
    Fault(
        "F8",
        "fused CPU kernels and found_inf",
        "if the script has a scaler of its own and a fused optimizer, an overflow on two ranks "
        "(found_inf 2) is applied",
        lambda found: _fp16_cpu(found) and kernel_applies_found_inf_2(),
    ),
    Fault(
        "F9",
        "fused SGD with momentum",
        "if the optimizer is SGD(momentum=..., fused=True) and its first scaled step overflows, "
        "its momentum starts from uninitialised memory",
        lambda found: found.fp16,
    ),
    Fault(
        "F10",
        "fused CPU kernels and strides",
        "if the optimizer is fused, a gradient laid out unlike its parameter gives a wrong update",
        lambda found: found.on_cpu and kernel_ignores_strides(),
    ),
    Fault(
        "F11",
        "no end to a run of skips",
        "the scale has no floor, a run of skips no end, and nothing names the tensor that "
        "overflowed",
        _fp16_device,
    ),
]


def _streak(found: Survey) -> list[Hazard]:
    """F11 where we scale: there is an end, once it is set."""
    config = found.settings.config
    if not found.attached or config.max_consecutive_skips is not None:
        return []
    floor = "" if config.min_scale is not None else " and no min_scale"
    return [
        Hazard(
            "F11",
            f"no max_consecutive_skips{floor}: a run whose every step overflows goes on to its "
            "end without one update; 50 ends it, naming the tensors",
        )
    ]


def _one_thread(found: Survey) -> bool:
    return found.threads.training == 1 and found.threads.share(found.job) > 1


def _thread_steps_on_cpu(found: Survey) -> bool:
    """The optimizer thread computes on cores of this host."""
    by_us = found.attached and found.threads.own_thread
    return by_us and (found.on_cpu or found.settings.config.offload == "cpu")


def _starved(found: Survey) -> list[Hazard]:
    """F12: cores that the optimizer could use and may not."""
    threads, share = found.threads, found.threads.share(found.job)
    if _thread_steps_on_cpu(found):
        if threads.optimizer >= threads.auto:
            return []
        text = f"optimizer_threads={threads.optimizer} where auto would give {threads.auto}"
    elif not _one_thread(found):
        return []
    elif found.on_cpu:
        text = f"OMP_NUM_THREADS=1: training and the optimizer step use one of {share} cores a rank"
    elif found.attached:
        return []  # the optimizer is on the device
    else:
        text = (
            f"OMP_NUM_THREADS=1: an optimizer in host memory would step on one of {share} cores a "
            "rank"
        )
    return [Hazard("F12", text)]


def _others(found: Survey) -> Iterator[Hazard]:
    yield from _old(found)
    yield from _misplaced(found)
    yield from _crowded(found)
    yield from _unused(found)
    config = found.settings.config
    if _fp16_cpu(found) and found.attached and found.devices.cpu_fp16 is False:
        yield Hazard(
            "slow-fp16",
            "this processor has no fp16 instructions: products in fp16 are computed in fp32 and "
            "rounded, slower than fp32; a backward that is not accelerator.backward(loss) is many "
            "times slower",
        )
    if config.telemetry is not None and found.settings.attach:
        trouble = telemetry_trouble(config.telemetry)
        if trouble:
            yield Hazard("telemetry", f"telemetry={config.telemetry!r}: {trouble}")


def _old(found: Survey) -> Iterator[Hazard]:
    for name, lowest in LOWEST.items():
        installed = found.versions[name]
        if installed is not None and Version(installed) < Version(lowest):
            yield Hazard(
                f"old-{name}", f"{name} {installed} is older than {lowest}, the oldest used"
            )


def _misplaced(found: Survey) -> Iterator[Hazard]:
    """Processes and the devices that there are for them."""
    job, count = found.job, len(found.devices.names)
    if not job.joined:
        yield Hazard(
            "lone-processes",
            f"no device joins the {job.processes} processes: each trains alone. On the CPU set "
            "ACCELERATE_USE_CPU=true in the environment (a config file's use_cpu does not reach "
            "them)",
        )
    elif job.device == "cpu" and not job.wants_cpu:
        yield Hazard("no-accelerator", "no accelerator is found: this trains on the CPU")
    if job.kind.startswith("FSDP") and job.device == "cpu":
        yield Hazard(
            "fsdp-on-cpu",
            "on the CPU Accelerate leaves FSDP out without a word: each rank keeps the whole model",
        )
    if job.device != "cpu" and job.processes_here > count > 0:
        yield Hazard(
            "too-few-devices", f"{job.processes_here} ranks on this host, which has {count} devices"
        )


def _crowded(found: Survey) -> Iterator[Hazard]:
    """An optimizer thread that takes cores from the training thread, or from its own team."""
    if not _thread_steps_on_cpu(found):
        return
    threads, share = found.threads, found.threads.share(found.job)
    beside = found.settings.config.step_mode != "sync"
    if beside and share < 2:
        yield Hazard(
            "few-cores",
            f"{threads.cores} cores for {found.job.processes_here} ranks: the optimizer thread "
            "shares a core with the training thread",
        )
    elif beside and found.on_cpu and threads.training + threads.optimizer > share:
        yield Hazard(
            "few-cores",
            f"{share} cores a rank, of which training takes {threads.training} (OMP_NUM_THREADS) "
            f"and the optimizer thread {threads.optimizer}: with none to spare, "
            f"step_mode={found.settings.config.step_mode} costs instead of saving",
        )
    elif threads.optimizer > share:
        yield Hazard(
            "few-cores", f"optimizer_threads={threads.optimizer}, but {share} cores a rank"
        )


def _unused(found: Survey) -> Iterator[Hazard]:
    """Settings that somebody set and that nothing will read."""
    settings, config = found.settings, found.settings.config
    given = [name for name in settings.sources if name != "attach"]
    if not settings.attach:
        why, unread = "attach is off (unless the script calls attach itself)", given
    elif not found.fp16:
        why = f"mixed_precision is {found.job.precision}"
        unread = [name for name in given if config.telemetry is None or not _is_watching(name)]
    else:
        why, unread = "step_mode is not delayed", []
        if config.step_mode != "delayed" and config.delay_warmup_steps:
            unread = ["delay_warmup_steps"]
    if unread:
        yield Hazard("unused-settings", f"{', '.join(unread)}: set, but not used, since {why}")


def _is_watching(name: str) -> bool:
    return name in ("telemetry", "underflow_interval", "find_overflow")


def telemetry_trouble(path: str) -> str | None:
    """Why a telemetry file cannot be appended to; None: nothing is known against it."""
    try:
        check_path(path.replace("{rank}", "0"))
    except ConfigError as error:
        return str(error).split("appended to: ")[-1].split(". Choose")[0]
    return None
