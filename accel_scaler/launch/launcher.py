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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import (
    CustomHelpFormatter,
    launch_command,
    launch_command_parser,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..config import (
    ENV_PREFIX,
    FIELDS,
    GROUPS,
    Settings,
    in_environment,
    in_flags,
    in_section,
    resolve,
)
from ..config_file import PACKAGE, find_config, read_config
from ..console import plain
from ..errors import ConfigError, UnsupportedError
from ..integrations import scaled_elsewhere
from ..telemetry import path_of, refuse_unwritable
from .flags import DEST, DOCTOR, HELP_ALL, USAGE, add_flags, own_parser, unknown_flags
from .totals import VARIABLE, Totals, closing_line, read_totals

STARTUP = str(PACKAGE / "launch" / "startup")
"""The folder in front of PYTHONPATH: its ``sitecustomize`` attaches."""


class _HelpFormatter(CustomHelpFormatter):  # type: ignore[misc]
    """Accelerate's, which leaves out what a command line does not use; ours is always in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles.extend((*GROUPS, DOCTOR))


class _HelpAll(argparse.Action):
    """Prints our flags and Accelerate's."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        print(parser.format_help(), end="")
        parser.exit()


def _refused(message: str) -> NoReturn:
    raise ConfigError(message)


def make_parser(own: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Accelerate's parser with a flag for each setting; values stay texts until they are merged.

    The script may be missing. What it refuses is a ``ConfigError``.

    Args:
        own: from :func:`own_parser`; ``--help`` prints its help.
    """
    own = own_parser() if own is None else own
    parser: argparse.ArgumentParser = launch_command_parser()
    parser.prog, parser.usage, parser.description = own.prog, own.usage, own.description
    parser.formatter_class = _HelpFormatter
    parser.error = _refused  # type: ignore[method-assign]
    parser.print_help = own.print_help  # type: ignore[method-assign]
    names = ("--help-all", "--help_all")  # Accelerate's help shows no name with a hyphen
    group = add_flags(parser)
    group.add_argument(*names, nargs=0, action=_HelpAll, default=argparse.SUPPRESS, help=HELP_ALL)
    script = next(action for action in parser._actions if action.dest == "training_script")
    script.nargs, script.required = "?", False
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The arguments for Accelerate, and ``{field: text}`` of our flags, which leave them.

    Raises:
        ConfigError: a flag that is not known, or a value that it does not take.
    """
    before = sys.argv
    sys.argv = ["accelerate-launch", *argv]  # where Accelerate's help looks for what is used
    try:
        args, unknown = parser.parse_known_args(argv)
    finally:
        sys.argv = before
    if unknown:
        raise unknown_flags(unknown, [n for each in parser._actions for n in each.option_strings])
    given = {name: args.__dict__.pop(DEST + name) for name in FIELDS}
    return args, {name: text for name, text in given.items() if text is not None}


def main(argv: Sequence[str]) -> int:
    """Run ``accel-scaler launch``; returns the exit status of the job.

    Raises:
        AccelScalerError: a setting, a file or a script that cannot be used; nothing was started.
    """
    args, flags = parse(make_parser(), argv)
    if args.training_script is None:
        raise ConfigError(f"no script was given; usage: {USAGE}")
    quiet = args.quiet
    with _signals_passed_on(), prepared(args, flags) as (_, settings), _told() as folder:
        if not quiet:
            print(plain(_announcement(settings)), file=sys.stderr, flush=True)
        path = path_of(settings.config, 0)
        path = None if path is None else os.path.expanduser(path)
        before = _size(path)
        with _environment(settings, folder):
            status = _run(args)
        grown = [path] if path is not None and _size(path) > before else []
        totals = Totals() if folder is None else read_totals(folder)
        line = closing_line(totals, grown, status)
        if line is not None and not quiet:
            print(plain(line), file=sys.stderr, flush=True)
        return status


@contextlib.contextmanager
def _told() -> Iterator[Path | None]:
    """The folder in which ranks tell what they did; None: there is no place for one."""
    try:
        folder = tempfile.mkdtemp(prefix="accel_scaler_")
    except OSError:  # then nothing is said at the end
        yield None
        return
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _size(path: str | None) -> int:
    """Bytes of a file; 0, where there is none."""
    return os.path.getsize(path) if path is not None and os.path.isfile(path) else 0


@contextlib.contextmanager
def prepared(
    args: argparse.Namespace, flags: Mapping[str, str]
) -> Iterator[tuple[Path | None, Settings]]:
    """The config file of a launch, if any, and its settings; ``args`` are ready for Accelerate.

    While this lasts ``args.config_file`` has no section of ours.

    Args:
        args: of Accelerate's parser; a ``training_script`` of None is not looked for.
        flags: ``{field: text}`` of the command line.

    Raises:
        ConfigError: a setting, a file or a script that cannot be used, said before the ranks do,
            each in its way.
        UnsupportedError: a job in which nothing can be attached.
    """
    path: Path | None = None
    if args.config_file is not None:
        path = find_config(args.config_file)
    elif os.path.isfile(default_config_file) and not args.cpu:  # as Accelerate decides it
        path = Path(default_config_file)
    file = None if path is None else read_config(path)
    settings = resolve(
        () if file is None else in_section(file), in_environment(os.environ), in_flags(flags)
    )
    _expect_script(args)
    with contextlib.ExitStack() as stack:
        defaults = None
        if file is not None:
            handed_over = file.path
            if file.rest is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="accel_scaler_"))
                handed_over = Path(folder) / file.path.name  # its ending tells JSON from YAML
                handed_over.write_text(file.rest, encoding="utf-8")
            args.config_file = str(handed_over)
            try:
                defaults = load_config_from_file(args.config_file)
            except Exception as error:  # of whatever class: Accelerate has none of its own
                text = " ".join(str(error).split()).replace(args.config_file, str(path))
                raise ConfigError(f"{path}: Accelerate cannot use it: {text}") from error
        if settings.attach:
            _refuse_other_scalers(args, defaults)
        _refuse_unwritable(settings, args, defaults)
        yield path, settings


def _run(args: argparse.Namespace) -> int:
    """Accelerate's launch; returns the status of the process that failed first, or 0."""
    quiet, args.quiet = args.quiet, None  # quiet, Accelerate ends with 1, whatever the status was
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        if not quiet:
            what = f"exited with status {error.returncode}"
            if error.returncode < 0:
                what = f"was ended by signal {-error.returncode}"
            print(plain(f"accel-scaler: {args.training_script} {what}"), file=sys.stderr)
        return _shell_status(error.returncode)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table: which rank, its status, when
        return _shell_status(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # torchrun has ended its ranks
        return 128 + int(error.sigval)
    return 0


def _shell_status(code: int) -> int:
    """An exit status as a shell gives it: 128 + n for a process that signal n ended."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[None]:
    """The script decides what SIGTERM, SIGHUP and Ctrl-C end; the launcher waits for its status.

    A terminal sends a Ctrl-C to the script, too. A signal that is ignored (nohup) stays so.
    torchrun has handlers of its own: it ends its ranks.
    """

    def pass_on(number: int, frame: object) -> None:
        children = psutil.Process().children()
        if not children:  # nothing has been started
            raise SystemExit(128 + number)
        for child in children if number != signal.SIGINT else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    names = [name for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, names)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _refuse_unwritable(settings: Settings, args: argparse.Namespace, defaults: Any) -> None:
    """Say it before ranks are started, which would say it one after the other."""
    rank = args.machine_rank
    if rank is None:
        rank = getattr(defaults, "machine_rank", 0)
    path = path_of(settings.config, rank)  # without {rank} the first host alone writes
    if path is not None:
        try:
            refuse_unwritable(path)
        except ConfigError as error:
            raise ConfigError(f"{error} ({settings.sources['telemetry']})") from None


def _expect_script(args: argparse.Namespace) -> None:
    script = args.training_script
    if script is None or args.module or script == "-":
        return  # Python says it
    if args.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"{script!r} is no executable, here or on PATH (--no_python).")
    elif not os.path.exists(script):
        raise ConfigError(f"the script {script!r} does not exist (from {os.getcwd()}).")


@contextlib.contextmanager
def _environment(settings: Settings, folder: Path | None) -> Iterator[None]:
    """The environment that the ranks inherit; afterwards it is as before."""
    before = dict(os.environ)
    python_path = before.get("PYTHONPATH")
    entries = [] if not python_path else python_path.split(os.pathsep)
    entries = [entry for entry in entries if entry != STARTUP]  # launched from a launched script
    if settings.attach:
        entries.insert(0, STARTUP)
    for key in before:
        if key.startswith(ENV_PREFIX):
            del os.environ[key]
    os.environ.update(settings.config.to_env())
    if folder is not None:
        os.environ[VARIABLE] = str(folder)
    if settings.attach or python_path is not None:
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
