"""What would go wrong in a launch as a :class:`LaunchPlan` has it, and what attaching mends in it.

F1 to F7, F11 and F12 are faults of docs/what-it-mends.md, known by precision, device and threads.
The others lie in torch's kernels or in other scalers, and no argument shows them. A hazard is
``(id, text)``: the number of a fault ("F1") or a word, which does not change, and a line for
people.
"""

from __future__ import annotations

from collections.abc import Iterator

from .environment import LaunchPlan

Hazard = tuple[str, str]

ON_A_DEVICE = {
    "F1": "a fused optimizer (the Trainer's default): step_was_skipped stays False on a skipped "
    "step, and the LR schedule moves",
    "F2": "two optimizers and clipping: the second one's gradients are unscaled twice",
    "F3": "two optimizers, the first overflows: the second is unscaled by the halved scale",
    "F4": "two optimizers: growth and back-off of the scale count twice",
    "F5": "clipping on every micro-batch of an accumulation: raises, or mixes scaled and unscaled "
    "gradients",
    "F7": 'float16 weights: "Attempting to unscale FP16 gradients."',
    "F11": "the scale has no floor, a run of skips no end, and nothing names the tensor that "
    "overflowed",
}
ON_THE_CPU = {"F6": "fp16 on the CPU: neither autocast nor a scaler; it trains in fp32, silently"}
"""Stock Accelerate's faults in fp16, if a script has the cause."""

WATCHING = ("telemetry", "underflow_interval", "find_overflow")
"""Settings that do something where nothing is scaled."""


def hazards(found: LaunchPlan) -> list[Hazard]:
    """Everything that this launch would meet; those with a number first."""
    stock = [] if found.attached else _stock_faults(found)
    return [*stock, *_scale_and_threads(found), *_misplaced(found), *_unused_settings(found)]


def mended(found: LaunchPlan) -> list[Hazard]:
    """What it would meet under stock Accelerate, and does not, because it is attached."""
    if not found.attached:
        return []
    those = [fault for fault in _stock_faults(found) if fault[0] != "F11"]
    if _one_core_trains(found) and _steps_beside_on_cpu(found):
        those.append(("F12", "OMP_NUM_THREADS=1, for the optimizer's step"))
    return those


def _stock_faults(found: LaunchPlan) -> list[Hazard]:
    faults = ON_THE_CPU if found.on_cpu else ON_A_DEVICE
    return list(faults.items()) if found.fp16 else []


def _one_core_trains(found: LaunchPlan) -> bool:
    return found.threads.training == 1 and found.threads.cores >= 2 * found.job.processes_here


def _steps_beside_on_cpu(found: LaunchPlan) -> bool:
    """The optimizer computes on cores of this host, on a thread of its own."""
    on_cpu = found.on_cpu or found.settings.config.offload == "cpu"
    return found.attached and found.threads.own_thread and on_cpu


def _scale_and_threads(found: LaunchPlan) -> Iterator[Hazard]:
    if found.attached and found.settings.config.max_consecutive_skips is None:
        yield (
            "F11",
            "no max_consecutive_skips: a run whose every step overflows goes on to its end "
            "without one update; 50 ends it, naming the tensors",
        )
    if found.on_cpu and _one_core_trains(found) and not _steps_beside_on_cpu(found):
        yield "F12", "OMP_NUM_THREADS=1: training uses one of the cores that a rank has"
    if found.attached and found.on_cpu and found.devices.cpu_fp16 is False:
        yield (
            "slow-fp16",
            "this processor has no fp16 instructions: products in fp16 are computed in fp32 and "
            "rounded, slower than fp32; a backward that is not accelerator.backward(loss) is many "
            "times slower",
        )


def _misplaced(found: LaunchPlan) -> Iterator[Hazard]:
    """Processes without the devices that they would need."""
    job = found.job
    if not job.joined:
        yield (
            "lone-processes",
            f"no device joins the {job.processes} processes: each trains alone. On the CPU set "
            "ACCELERATE_USE_CPU=true in the environment (a config file's use_cpu does not reach "
            "them)",
        )
    elif job.device == "cpu" and not job.wants_cpu:
        yield "no-accelerator", "no accelerator is found: this trains on the CPU"
    if job.kind.startswith("FSDP") and job.device == "cpu":
        yield (
            "fsdp-on-cpu",
            "on the CPU Accelerate leaves FSDP out without a word: each rank keeps the whole model",
        )


def _unused_settings(found: LaunchPlan) -> Iterator[Hazard]:
    """Settings that somebody set and that nothing will read."""
    settings = found.settings
    given = [name for name in settings.sources if name != "attach"]
    why = "attach is off (unless the script calls attach itself)"
    if settings.attach:
        why = f"mixed_precision is {found.job.precision}"
        given = [name for name in given if not found.fp16 and name not in WATCHING]
    if given:
        yield "unused-settings", f"{', '.join(given)}: set, but not used, since {why}"
