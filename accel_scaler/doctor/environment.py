"""What a launch would start, on this machine, found out without starting anything.

Accelerate's own parser and its own merging of flags and config file say what would run; torch says
which devices there are. No Accelerator is made, no process group, no file is kept.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from accelerate.commands.launch import _validate_launch_command
from accelerate.utils import patch_environment
from accelerate.utils.environment import str_to_bool

from ..async_optimizer import default_threads
from ..config import Settings
from ..devices import JOINS_BY_ITSELF
from ..errors import ConfigError
from ..version import __version__

PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft")


@dataclass(frozen=True)
class Devices:
    """What there is to train on."""

    accelerator: str | None
    """Type of the accelerators ("cuda"); None: there is none."""
    names: tuple[str, ...]
    """One for each accelerator."""
    cpu_fp16: bool | None
    """The processor computes in float16; None: this torch cannot say."""


@dataclass(frozen=True)
class Processes:
    """The processes of a launch."""

    precision: str
    """``mixed_precision`` that each gets; what a script gives its Accelerator outranks it."""
    kind: str
    """"one process", "DDP", "FSDP1", "FSDP2", "MPI", "DEEPSPEED", "MEGATRON_LM" or "XLA"."""
    device: str
    """Type of the device that each trains on."""
    wants_cpu: bool
    """Somebody has asked for the CPU."""
    hosts: int
    processes: int
    """On all hosts."""
    processes_here: int
    joined: bool
    """False: several processes that would not know of each other."""


@dataclass(frozen=True)
class Threads:
    """The thread plan of one rank."""

    cores: int
    """Physical cores that this process may use."""
    training: int
    """OMP_NUM_THREADS as the launcher sets it: of CPU kernels on the training thread."""
    auto: int
    """What ``optimizer_threads="auto"`` is in such a rank."""
    optimizer: int
    """Of CPU kernels on the optimizer thread."""
    own_thread: bool
    """The optimizer steps on a thread of its own, or is awaited there."""


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that the hazards are judged by."""

    versions: dict[str, str | None]
    """Of Python, this package and ``PACKAGES``; None: not installed."""
    devices: Devices
    job: Processes
    threads: Threads
    settings: Settings

    @property
    def attached(self) -> bool:
        """Accelerators of this launch are attached, and scale."""
        return self.settings.attach and self.fp16 and self.settings.config.enabled

    @property
    def fp16(self) -> bool:
        """Gradients need scaling."""
        return self.job.precision == "fp16"

    @property
    def on_cpu(self) -> bool:
        """Training runs on the CPU."""
        return self.job.device == "cpu"


def plan_of(args: argparse.Namespace, settings: Settings, environ: Mapping[str, str]) -> LaunchPlan:
    """Look at this machine and at the job that ``args`` (of Accelerate's parser) describe.

    Args:
        args: a config file in it has no section any more; they are filled in, as by Accelerate.

    Raises:
        ConfigError: Accelerate refuses these arguments, in its words.
    """
    log = logging.getLogger("accelerate.commands.launch")
    was_disabled, log.disabled = log.disabled, True
    try:
        _validate_launch_command(args)  # merges flags, config file and defaults
    except Exception as error:  # of whatever class: Accelerate has none of its own
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Accelerate refuses these arguments: {text}") from error
    finally:
        log.disabled = was_disabled
    devices = _devices()
    job = _job(args, devices, environ)
    versions: dict[str, str | None] = {name: _version(name) for name in PACKAGES}
    versions = {"python": platform.python_version(), "accel_scaler": __version__, **versions}
    return LaunchPlan(versions, devices, job, _threads(args, job, settings), settings)


def _version(name: str) -> str | None:
    try:
        return version(name)  # importing transformers would take seconds
    except PackageNotFoundError:
        return None


def _devices() -> Devices:
    asks = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    cpu_fp16 = None if asks is None else bool(asks())
    # In this order: without a device torch 2.6 has an error for whoever asks for the current one.
    current = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not current:
        return Devices(None, (), cpu_fp16)
    kind, count = current.type, torch.accelerator.device_count()
    name_of: Any = getattr(getattr(torch, kind), "get_device_name", lambda index: kind)
    return Devices(kind, tuple(str(name_of(index)) for index in range(count)), cpu_fp16)


def _job(args: argparse.Namespace, devices: Devices, environ: Mapping[str, str]) -> Processes:
    kind = _kind(args)
    several = kind not in ("one process", "XLA")
    processes = max(args.num_processes or 1, 1) if several else 1
    hosts = max(args.num_machines or 1, 1) if several else 1
    if kind == "one process":  # the one launcher that passes the config file's use_cpu on
        wants_cpu = bool(args.cpu or getattr(args, "use_cpu", False))
    else:
        wants_cpu = kind == "MPI" or bool(str_to_bool(environ.get("ACCELERATE_USE_CPU", "false")))
    device = "cpu" if wants_cpu or devices.accelerator is None else devices.accelerator
    return Processes(
        precision=str(args.mixed_precision).lower(),
        kind=kind,
        device="xla" if kind == "XLA" else device,
        wants_cpu=wants_cpu,
        hosts=hosts,
        processes=processes,
        processes_here=max(processes // hosts, 1),
        joined=processes == 1 or wants_cpu or device in JOINS_BY_ITSELF,
    )


def _kind(args: argparse.Namespace) -> str:
    """Which of Accelerate's launchers runs, in the order in which it asks."""
    if not args.cpu:
        if args.use_deepspeed:
            return "DEEPSPEED"
        if args.use_fsdp:
            return f"FSDP{args.fsdp_version}"
        if args.use_megatron_lm:
            return "MEGATRON_LM"
        if args.multi_gpu:
            return "DDP"
        if args.tpu:
            return "XLA"
    return "one process" if args.mpirun_hostfile is None else "MPI"


def _threads(args: argparse.Namespace, job: Processes, settings: Settings) -> Threads:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(psutil.cpu_count(logical=False) or allowed or 1, allowed or 1)
    with patch_environment(local_world_size=job.processes_here):
        auto = default_threads()  # as a rank will ask
    config = settings.config
    asked = config.optimizer_threads
    return Threads(
        cores=cores,
        training=int(args.num_cpu_threads_per_process or 1),
        auto=auto,
        optimizer=auto if asked == "auto" else asked,
        own_thread=config.step_mode != "sync" or config.offload != "none",
    )
