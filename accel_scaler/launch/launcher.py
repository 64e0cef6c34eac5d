"""``accel-scaler launch``: Accelerate's own launcher, with settings, for an unchanged script.

Accelerate's parser reads the command line and Accelerate's functions start the processes. This
module adds flags, takes the ``accel_scaler:`` section out of the config file, and passes the
settings on in the environment, with the folder whose ``sitecustomize`` attaches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import (
    CustomHelpFormatter,
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..config import (
    ENV_PREFIX,
    FIELDS,
    GROUPS,
    Found,
    Settings,
    in_environment,
    in_flags,
    in_section,
    resolve,
)
from ..config_file import PACKAGE, ConfigFile, find_config, read_config
from ..console import plain, say, written
from ..errors import AccelScalerError, ConfigError, UnsupportedError
from ..integrations import scaled_elsewhere
from ..telemetry import path_of, refuse_unwritable
from .flags import DEST, HELP_ALL, USAGE, add_flags, own_parser, unknown_flags
from .totals import VARIABLE, Totals, closing_line, read_totals

STARTUP = str(PACKAGE / "launch" / "startup")
"""The folder in front of PYTHONPATH: its ``sitecustomize`` attaches."""


class _HelpFormatter(CustomHelpFormatter):  # type: ignore[misc]
    """Accelerate's, which leaves out what a command line does not use; ours is always in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles.extend(GROUPS)


class _HelpAll(argparse.Action):
    """Prints our flags and Accelerate's."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        print(parser.format_help(), end="")
        parser.exit()


def _refused(message: str) -> NoReturn:
    raise ConfigError(message)


def make_parser() -> argparse.ArgumentParser:
    """Accelerate's parser with a flag for each setting; values stay texts until they are merged.

    The script may be missing. What it refuses is a ``ConfigError``.
    """
    own = own_parser()
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
    """Run ``accel-scaler launch``; returns the exit status of the job, or of a dry run.

    Raises:
        AccelScalerError: a setting, a file or a script that cannot be used; nothing was started.
    """
    args, flags = parse(make_parser(), argv)
    if args.__dict__.pop("dry_run"):
        return _dry_run(args, flags)
    quiet = args.quiet
    with _signals_passed_on(), prepared(args, flags) as settings, _told() as folder:
        assert settings is not None
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
    args: argparse.Namespace,
    flags: Mapping[str, str],
    refusals: list[AccelScalerError] | None = None,
) -> Iterator[Settings | None]:
    """The settings of a launch, None where one is refused; ``args`` are ready for Accelerate.

    While this lasts ``args.config_file`` has no section of ours.

    Args:
        args: of Accelerate's parser.
        flags: ``{field: text}`` of the command line.
        refusals: takes every refusal; None: the first one is raised.

    Raises:
        ConfigError: a setting, a file or a script that cannot be used, said before the ranks do,
            each in its way.
        UnsupportedError: a job in which nothing can be attached.
    """
    file = settings = defaults = None
    found: list[list[Found]] = []
    with _kept_in(refusals):
        file = _config_file(args)
    for setting in _one_by_one(file, flags):
        with _kept_in(refusals):
            found.append(list(setting))
    if not refusals:
        with _kept_in(refusals):
            settings = resolve(*found)
    with _kept_in(refusals):
        _expect_script(args)
    with contextlib.ExitStack() as stack:
        with _kept_in(refusals):
            defaults = None if file is None else stack.enter_context(_handed_over(args, file))
        for refuse in (_refuse_other_scalers, _refuse_unwritable):
            with _kept_in(refusals):
                if settings is not None:
                    refuse(settings, args, defaults)
        yield settings


@contextlib.contextmanager
def _kept_in(refusals: list[AccelScalerError] | None) -> Iterator[None]:
    """A refusal in the block is added to these; None: it is raised."""
    try:
        yield
    except AccelScalerError as error:
        if refusals is None:
            raise
        refusals.append(error)


def _config_file(args: argparse.Namespace) -> ConfigFile | None:
    if args.config_file is not None:
        return read_config(find_config(args.config_file))
    if os.path.isfile(default_config_file) and not args.cpu:  # as Accelerate decides it
        return read_config(default_config_file)
    return None


def _one_by_one(file: ConfigFile | None, flags: Mapping[str, str]) -> Iterator[Iterable[Found]]:
    """Each setting of the file, of the environment and of the flags, so that each is checked."""
    if file is not None:
        for name, value in file.values.items():
            yield in_section(dataclasses.replace(file, values={name: value}))
    for key, text in sorted(os.environ.items()):
        yield in_environment({key: text})
    for name, text in flags.items():
        yield in_flags({name: text})


@contextlib.contextmanager
def _handed_over(args: argparse.Namespace, file: ConfigFile) -> Iterator[Any]:
    """Accelerate's own reading of the file, of which ``args`` name a copy without our section."""
    with contextlib.ExitStack() as stack:
        handed_over = file.path
        if file.rest is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="accel_scaler_"))
            handed_over = Path(folder) / file.path.name  # its ending tells JSON from YAML
            handed_over.write_text(file.rest, encoding="utf-8")
        args.config_file = str(handed_over)
        try:
            defaults = load_config_from_file(args.config_file)
        except Exception as error:  # of whatever class: Accelerate has none of its own
            text = " ".join(str(error).split()).replace(args.config_file, str(file.path))
            raise ConfigError(f"{file.path}: Accelerate cannot use it: {text}") from error
        yield defaults


def _dry_run(args: argparse.Namespace, flags: Mapping[str, str]) -> int:
    """Print every setting with its source, then every refusal; returns 2 where there is one."""
    refusals: list[AccelScalerError] = []
    with prepared(args, flags, refusals) as settings:
        if not refusals:
            with _kept_in(refusals):
                _refuse_as_accelerate(args)
    if settings is not None:
        values = {"attach": settings.attach, **dataclasses.asdict(settings.config)}
        rows = [(n, written(v), settings.sources.get(n, "default")) for n, v in values.items()]
        name, value, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        for row in rows:
            say(f"{row[0]:{name}}  {row[1]:{value}}  {row[2]}")
    for error in refusals:
        print("accel-scaler: error:", plain(" ".join(str(error).split())), file=sys.stderr)
    if not refusals:
        say("A launch would refuse nothing of this. It was not started: --dry_run.")
    return 2 if refusals else 0


def _refuse_as_accelerate(args: argparse.Namespace) -> None:
    """Flags and files that contradict each other, as its launcher would meet them."""
    log = logging.getLogger("accelerate.commands.launch")
    was_disabled, log.disabled = log.disabled, True
    try:
        _validate_launch_command(args)
    except Exception as error:  # of whatever class: Accelerate has none of its own
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Accelerate refuses these arguments: {text}") from error
    finally:
        log.disabled = was_disabled


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


def _refuse_other_scalers(settings: Settings, args: argparse.Namespace, defaults: Any) -> None:
    """Kinds of launch that ``attach`` would refuse in every rank, or could not reach."""
    # Accelerate asks the file only where no flag has chosen; --cpu outranks both.
    chosen = (args.multi_gpu, args.tpu, args.use_deepspeed, args.use_fsdp, args.use_megatron_lm)
    by_file = "" if defaults is None or any(chosen) else defaults.distributed_type.value
    flags = {"DEEPSPEED": args.use_deepspeed, "MEGATRON_LM": args.use_megatron_lm, "XLA": args.tpu}
    kind = next((kind for kind, flag in flags.items() if flag), by_file)
    found = None if args.cpu else scaled_elsewhere(kind)
    if defaults is not None and defaults.compute_environment.value == "AMAZON_SAGEMAKER":
        found = "Amazon SageMaker runs the script where this launcher does not reach"
    if found is not None and settings.attach:
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
    if script is None:
        raise ConfigError(f"no script was given; usage: {USAGE}")
    if args.module or script == "-":
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
