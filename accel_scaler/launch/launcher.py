"""``accel-scaler launch``: Accelerate's parser and launcher, with our flags and our settings.

The ``accel_scaler:`` section is taken out of the config file. The settings reach the processes in
the environment, beside the folder whose ``sitecustomize`` attaches.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from accelerate.commands.config import default_config_file
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from accelerate.utils import clear_environment
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..config import (
    ENV_PREFIX,
    FIELDS,
    ScalerConfig,
    Source,
    environment,
    merge,
    refuse_retired,
    suggestion,
)
from ..config_file import PACKAGE, as_section, find_config, read_config
from ..console import plain, say, written
from ..devices import present_type
from ..errors import ConfigError, UnsupportedError
from ..integrations import SCALE_SETTINGS, scaled_elsewhere
from .flags import DEST, USAGE, add_flags, own_parser

STARTUP = str(PACKAGE / "launch" / "startup")
"""The folder in front of PYTHONPATH, whose ``sitecustomize`` attaches."""
USE_CPU = "ACCELERATE_USE_CPU"
FP16_ONLY = {*SCALE_SETTINGS, "enabled"}
"""Settings that do nothing in other precisions."""


def make_parser() -> argparse.ArgumentParser:
    """Accelerate's parser with our flags and our help; it refuses with a ``ConfigError``."""
    own, parser = own_parser(), launch_command_parser()
    parser.prog, parser.usage, parser.print_help = own.prog, own.usage, own.print_help
    parser.error = _refuse
    add_flags(parser)
    return parser  # type: ignore[no-any-return]


def _refuse(message: str) -> NoReturn:
    is_missing = "required: training_script" in message
    raise ConfigError(f"no script is given; usage: {USAGE}" if is_missing else message)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Accelerate's arguments, and ours without the prefix. Raises ``ConfigError`` for an unknown
    flag, or a value that Accelerate refuses."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        refuse_retired(flag.lstrip("-").replace("-", "_").removeprefix("no_"))
        known = [name for action in parser._actions for name in action.option_strings]
        help_ = "See --help, and `accelerate launch --help`."
        raise ConfigError(
            f"unknown flag {flag}. {suggestion(flag.replace('-', '_'), known, help_)} The script's "
            "own arguments come after the script."
        )
    ours = {name: value for name, value in vars(args).items() if name.startswith(DEST)}
    for name in ours:
        delattr(args, name)
    return args, argparse.Namespace(**{name[len(DEST) :]: ours[name] for name in ours})


def main(argv: Sequence[str]) -> int:
    """Run ``accel-scaler launch``; returns the exit status of the job. Raises an
    ``AccelScalerError`` before anything starts."""
    args, ours = parse(argv)
    with tempfile.TemporaryDirectory(prefix="accel_scaler_") as folder:
        config, sources, merged = prepare(args, ours, Path(folder))
        asked, started = _processes(merged)
        if started < asked and not args.quiet:
            text = (
                f"num_processes is {asked}, but Accelerate starts one process here: only "
                "--multi_gpu (in a file distributed_type: MULTI_GPU) starts several. On a CPU give "
                f"that, and set {USE_CPU}=true in the environment, too."
            )
            print("accel-scaler: warning:", text, file=sys.stderr)
        if ours.dry_run:
            _say_settings(config, sources, merged)
            return 0
        if not args.quiet:
            texts: dict[str, list[str]] = {}
            for name, source in sources.items():
                texts.setdefault(source, []).append(f"{name}={getattr(config, name)!r}")
            changed = [f"{', '.join(each)} ({source})" for source, each in texts.items()]
            what = f"attaching with {', '.join(changed) or 'the defaults'}"
            what = "nothing is attached (--no_attach)" if ours.no_attach else what
            what += f"; mixed_precision={merged.mixed_precision!r}"
            what += ". What the script sets itself takes precedence."
            print(plain(f"accel-scaler: {what}"), file=sys.stderr, flush=True)
        with _environment(config.to_env(sources), ours.no_attach):
            return _run(args)


def prepare(
    args: argparse.Namespace, ours: argparse.Namespace, folder: Path
) -> tuple[ScalerConfig, dict[str, str], argparse.Namespace]:
    """The settings of a launch, the sources of the changed ones, and Accelerate's arguments with
    its config file. ``folder`` takes a config file without our section, which replaces the one in
    Accelerate's ``args``."""
    flags = {name: text for name in FIELDS if (text := getattr(ours, name)) is not None}
    file = _take_section(args, folder)
    config, sources = merge(*file, environment(os.environ), ("command line", flags))
    script = args.training_script
    if not (args.module or args.no_python or script == "-" or os.path.exists(script)):
        raise ConfigError(f"the script {script!r} does not exist (from {os.getcwd()}).")
    merged = _merged_by_accelerate(args)
    if not ours.no_attach:
        _refuse_unsuitable(merged)
    return config, sources, merged


def _say_settings(config: ScalerConfig, sources: dict[str, str], merged: Any) -> None:
    """Print the table of a dry run, and the section for a config file. Without a loss scale its
    settings are left out, but for those that something sets."""
    rows = {
        "mixed_precision": (merged.mixed_precision or "no", "Accelerate"),
        "num_processes": (_processes(merged)[1], "Accelerate"),
    }
    hidden = () if merged.mixed_precision == "fp16" else FP16_ONLY
    refused = {*SCALE_SETTINGS} & config.changed().keys()
    for name, value in dataclasses.asdict(config).items():
        source = sources.get(name, "default")
        if name in hidden:
            source += "; refused without fp16" if name in refused else "; fp16 only"
        if name in sources or name not in hidden:
            rows[name] = value, source
    for name, (value, source) in rows.items():
        say(f"{name:<22} {written(value):<12} {source}")
    if sources:
        given = {name: getattr(config, name) for name in sources}
        say("\nFor a config file:\n" + as_section(given).rstrip())


def _processes(merged: Any) -> tuple[int, int]:
    """How many processes are asked for, and how many Accelerate starts, on all machines."""
    asked = int(merged.num_processes or 1)  # a file may hold a text
    several = ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "tpu")
    is_one = merged.cpu or not any(getattr(merged, flag) for flag in several)
    return asked, 1 if is_one and merged.mpirun_hostfile is None else asked


def _take_section(args: argparse.Namespace, folder: Path) -> list[Source]:
    """Our section of the config file, if there is one; ``args`` then name a copy without it."""
    if args.config_file is not None:
        path = find_config(args.config_file)
    elif os.path.isfile(default_config_file) and not args.cpu:  # as in Accelerate
        path = Path(default_config_file)
    else:
        return []
    section, rest = read_config(path)
    if not path.stat().st_size:
        raise ConfigError(
            f"{path}: the file is empty. First: accelerate config --config_file {path}"
        )
    copy = folder / "config.yaml"
    if rest is not None:
        copy.write_text(rest, encoding="utf-8")
    name, args.config_file = args.config_file or str(path), str(path if rest is None else copy)
    return [(name, section)]


def _merged_by_accelerate(args: argparse.Namespace) -> Any:
    """Accelerate's arguments, with its config file and its defaults. Raises ``ConfigError`` where
    Accelerate refuses them."""
    log = logging.getLogger("accelerate.commands.launch")
    was_disabled, log.disabled = log.disabled, True  # the launch repeats the warnings of defaults
    try:
        merged, _, _ = _validate_launch_command(argparse.Namespace(**vars(args)))
    except Exception as error:  # Accelerate raises many classes
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Accelerate refuses these arguments: {text}") from error
    finally:
        log.disabled = was_disabled
    return merged


def _refuse_unsuitable(merged: Any) -> None:
    """Raise ``UnsupportedError`` for FSDP that Accelerate would leave out, and other scalers."""
    ranks, present = str(merged.num_processes or 1), present_type()  # a file may hold a text
    reasons = {
        "use_cpu": merged.cpu or merged.use_cpu,
        USE_CPU: os.environ.get(USE_CPU, "").lower() in ("y", "yes", "t", "true", "on", "1"),
        f"this machine has {present} only": present in ("cpu", "mps"),
    }
    why = next(filter(reasons.get, reasons), None)
    if merged.use_fsdp and ranks != "1" and why is not None:
        raise UnsupportedError(
            f"got FSDP with num_processes={ranks} without GPUs ({why}): Accelerate shards nothing "
            f"there; each process would hold the whole model, and without {USE_CPU}=true train "
            "alone. Take out what forbids GPUs, or give --num_processes 1; for DDP on a CPU give "
            "--multi_gpu, with that variable."
        )
    kinds = {"use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "tpu": "XLA"}
    for flag, kind in kinds.items():
        if getattr(merged, flag) and not merged.cpu:
            raise UnsupportedError(
                f"nothing can be attached: {scaled_elsewhere(kind)}. Add --no_attach, or use "
                "`accelerate launch`."
            )


@contextmanager
def _environment(settings: dict[str, str], is_off: bool) -> Iterator[None]:
    """In the block the environment is the one for the ranks."""
    kept = {key: os.environ[key] for key in os.environ if not key.startswith(ENV_PREFIX)}
    entries = kept["PYTHONPATH"].split(os.pathsep) if kept.get("PYTHONPATH") else []
    entries = [entry for entry in entries if entry != STARTUP]  # a launched script may launch
    path = os.pathsep.join(entries if is_off else [STARTUP, *entries])
    with clear_environment():
        os.environ.update(kept | settings | {"PYTHONPATH": path})
        yield


def _run(args: argparse.Namespace) -> int:
    """Accelerate's launch; returns the exit status of the process that failed first, or 0."""
    quiet, args.quiet = args.quiet, None  # with quiet Accelerate turns every status into 1
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        if not quiet:
            text = f"accel-scaler: {args.training_script} ended with status {error.returncode}"
            print(plain(text), file=sys.stderr)
        return _shell_status(error.returncode)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table: rank, status, time
        return _shell_status(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # torchrun has ended the ranks
        return 128 + int(error.sigval)
    return 0


def _shell_status(code: int) -> int:
    """The exit status in a shell: 128 + n for a process that signal n ended."""
    return code if code >= 0 else 128 - code
