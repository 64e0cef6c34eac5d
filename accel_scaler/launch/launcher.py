"""``accel-scaler launch``: Accelerate's own launcher, with settings, for an unchanged script.

Accelerate's parser reads the command line and Accelerate's functions start the processes. This
module adds flags, takes the ``accel_scaler:`` section out of the config file, and passes the
settings on in the environment, with the folder whose ``sitecustomize`` attaches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import (
    CustomHelpFormatter,
    launch_command,
    launch_command_parser,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..config import ENV_PREFIX
from ..config_file import PACKAGE, ConfigFile, find_config, read_config
from ..console import plain
from ..errors import ConfigError, UnsupportedError
from ..integrations import scaled_elsewhere
from .settings import FIELDS, Settings, descriptions, resolve
from .signals import Ended, end_children, ended_by_signals, shell_status

__all__ = ["launch", "main", "make_parser"]

STARTUP = str(PACKAGE / "launch" / "startup")
"""The folder in front of PYTHONPATH: its ``sitecustomize`` attaches."""

TITLE = "accel_scaler Arguments"
_DEST = "accel_scaler_"
_DESCRIPTION = (
    "Launch a script as `accelerate launch` does, with every Accelerator and Trainer it makes "
    "attached. Takes all arguments of `accelerate launch`; a config file may have an "
    "`accel_scaler:` section. A flag outranks a variable ACCEL_SCALER_<FIELD>, that the section, "
    "that the default. --config_file also takes the name of a shipped file."
)


class _HelpFormatter(CustomHelpFormatter):  # type: ignore[misc]
    """Accelerate's, which leaves out what a command line does not use; ours is always in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles.append(TITLE)


def make_parser() -> argparse.ArgumentParser:
    """Accelerate's parser with a flag for each setting; values stay texts until they are merged."""
    parser: argparse.ArgumentParser = launch_command_parser()
    parser.prog, parser.description = "accel-scaler launch", _DESCRIPTION
    parser.formatter_class = _HelpFormatter
    group = parser.add_argument_group(TITLE, "Settings of the scaler and the optimizer step.")
    texts = descriptions()
    for name, spec in FIELDS.items():
        about = f"{texts[name]} ({spec.metadata['allowed']})".replace("%", "%%")
        dest = _DEST + name
        if spec.type == "bool":  # as Accelerate's own: no value, or the next word would be one
            group.add_argument(
                f"--{name}", dest=dest, action="store_const", const="true", help=about
            )
            group.add_argument(
                f"--no_{name}", dest=dest, action="store_const", const="false", help="the opposite"
            )
        else:
            group.add_argument(f"--{name}", dest=dest, metavar="VALUE", help=about)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``accel-scaler launch``; returns the exit status of the job.

    Raises:
        AccelScalerError: a setting, a file or a script that cannot be used; nothing was started.
    """
    before = sys.argv
    sys.argv = ["accelerate-launch", *argv]  # where Accelerate's help looks for what is used
    try:
        args = make_parser().parse_args(argv)
    finally:
        sys.argv = before
    flags = {}
    for name in FIELDS:
        text = args.__dict__.pop(_DEST + name)
        if text is not None:
            flags[name] = text
    return launch(args, flags)


def find_settings(
    args: argparse.Namespace, flags: Mapping[str, str]
) -> tuple[Path | None, ConfigFile | None, Settings]:
    """The config file of a command line, if any, where it is, and all settings merged."""
    path: Path | None = None
    if args.config_file is not None:
        path = find_config(args.config_file)
    elif os.path.isfile(default_config_file) and not args.cpu:  # as Accelerate decides it
        path = Path(default_config_file)
    file = None if path is None else read_config(path)
    return path, file, resolve(file, os.environ, flags)


def launch(args: argparse.Namespace, flags: Mapping[str, str]) -> int:
    """Start the job of ``args`` (of Accelerate's parser) with the settings merged."""
    _, file, settings = find_settings(args, flags)
    _expect_script(args)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        if file is not None:
            args.config_file = stack.enter_context(_without_section(file))
            _read_by_accelerate(args, file, settings)
        elif settings.attach:
            _refuse_other_scalers(args, None)
        stack.enter_context(_environment(settings))
        if not args.quiet:
            print(plain(_announcement(settings)), file=sys.stderr, flush=True)
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    """Accelerate's launch; returns the status of the process that failed first, or 0."""
    quiet, args.quiet = args.quiet, None  # quiet, Accelerate ends with 1, whatever the status was
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        status = shell_status(error.returncode)
        if not quiet:
            what = f"exited with status {error.returncode}"
            if error.returncode < 0:
                what = f"was ended by signal {-error.returncode}"
            print(plain(f"accel-scaler: {args.training_script} {what}"), file=sys.stderr)
        return status
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table: which rank, its status, when
        return shell_status(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # torchrun has ended its ranks
        return 128 + int(error.sigval)
    except (KeyboardInterrupt, Ended) as error:
        return end_children(error)
    return 0


@contextlib.contextmanager
def _without_section(file: ConfigFile) -> Iterator[str]:
    """The path of a file that Accelerate reads; a temporary one if a section was taken out."""
    if file.rest is None:
        yield str(file.path)
        return
    with tempfile.TemporaryDirectory(prefix="accel_scaler_") as folder:
        handed_over = Path(folder) / file.path.name  # its ending tells JSON from YAML
        handed_over.write_text(file.rest, encoding="utf-8")
        yield str(handed_over)


def _read_by_accelerate(args: argparse.Namespace, file: ConfigFile, settings: Settings) -> None:
    """Let Accelerate read its part before anything starts: errors name the user's file."""
    try:
        defaults = load_config_from_file(args.config_file)
    except Exception as error:  # of whatever class: Accelerate has none of its own
        text = " ".join(str(error).split()).replace(args.config_file, str(file.path))
        raise ConfigError(f"{file.path}: Accelerate cannot use it: {text}") from error
    if settings.attach:
        _refuse_other_scalers(args, defaults)


def _refuse_other_scalers(args: argparse.Namespace, defaults: Any) -> None:
    """Kinds of launch that ``attach`` would refuse in every rank, or could not reach."""
    # Accelerate asks the file only where no flag has chosen; --cpu outranks both.
    chosen = (args.multi_gpu, args.tpu, args.use_deepspeed, args.use_fsdp, args.use_megatron_lm)
    by_file = "" if defaults is None or any(chosen) else defaults.distributed_type.value
    flags = {"DEEPSPEED": args.use_deepspeed, "MEGATRON_LM": args.use_megatron_lm, "XLA": args.tpu}
    kind = next((kind for kind, flag in flags.items() if flag), by_file)
    found = None if args.cpu else scaled_elsewhere(kind)
    if defaults is not None and defaults.compute_environment.value == "AMAZON_SAGEMAKER":
        found = "Amazon SageMaker runs the script where this launcher does not reach"
    if found is not None:
        raise UnsupportedError(
            f"nothing can be attached: {found}. Add --no_attach, or use `accelerate launch`."
        )


def _expect_script(args: argparse.Namespace) -> None:
    """Say of a script that is not there before the ranks do, each in its way."""
    script = args.training_script
    if args.module or script == "-":
        return  # Python says it
    if args.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"{script!r} is no executable, here or on PATH (--no_python).")
    elif not os.path.exists(script):
        raise ConfigError(f"the script {script!r} does not exist (from {os.getcwd()}).")


@contextlib.contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """The environment that the ranks inherit; afterwards it is as before."""
    before = dict(os.environ)
    for key in before:
        if key.startswith(ENV_PREFIX):
            del os.environ[key]
    os.environ.update(settings.config.to_env())
    python_path = before.get("PYTHONPATH", "")
    entries = [entry for entry in python_path.split(os.pathsep) if entry != STARTUP]
    if settings.attach:
        if os.pathsep in STARTUP:
            raise ConfigError(
                f"the package lies in {STARTUP!r}; a path with {os.pathsep!r} cannot stand in "
                "PYTHONPATH, so nothing can be attached. Install it elsewhere, or add --no_attach."
            )
        # An empty entry would mean the current directory.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [STARTUP, *entries] if python_path else [STARTUP]
        )
    elif STARTUP in python_path.split(os.pathsep):  # launched from a launched script
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    try:
        yield
    finally:
        for key in set(os.environ) - set(before):
            del os.environ[key]
        os.environ.update(before)


def _announcement(settings: Settings) -> str:
    """One line: what is attached with, and who said so."""
    if not settings.attach:
        return "accel-scaler: attach is off; the script runs as under `accelerate launch`."
    changed = [
        f"{name}={value!r} ({settings.sources[name]})"
        for name, value in dataclasses.asdict(settings.config).items()
        if name in settings.sources
    ]
    return f"accel-scaler: attaching with {', '.join(changed) or 'the defaults'}."
