"""The command ``accel-scaler``: its subcommands, and errors on one line.

Without a command, and for the version, nothing is imported that takes long; torch least of all.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from .console import plain
from .errors import AccelScalerError, ConfigError, refuse_retired, shown
from .version import __version__

__all__ = ["main"]

COMMANDS = {
    "launch": "start an unchanged script as `accelerate launch` does, attached",
    "report": "draw what the scaler did, from telemetry files",
}
EXAMPLE = """\
example:
  accel-scaler launch --mixed_precision fp16 --telemetry run.jsonl train.py
  accel-scaler report run.jsonl

accel-scaler COMMAND --help says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-scaler``; returns the exit status.

    0: done. 2: a wrong argument, setting or file, one line on stderr. ``launch`` returns the status
    of the process that failed first. 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except AccelScalerError as error:
        print("accel-scaler: error:", plain(" ".join(str(error).split())), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    command = argv[0] if argv else None
    if argv[:2] in (["launch", "-h"], ["launch", "--help"]):
        from .launch.flags import own_parser

        own_parser().print_help()
        return 0
    if command == "launch":
        # Its arguments are Accelerate's business, which costs a while to import.
        from .launch.launcher import main as launch

        return launch(argv[1:])
    parser, parsers = _make_parser()
    if command is None:
        parser.print_help()
        return 0
    if command == "report":
        from . import report

        for option in (each.partition("=")[0] for each in argv[1:] if each.startswith("-")):
            refuse_retired(f"accel-scaler report {option}", option, "accel-scaler report")
        report.add_arguments(parsers[command])
        return report.run(parser.parse_args(argv))
    if not command.startswith("-"):
        refuse_retired(f"accel-scaler {command}", f"accel-scaler {command}", "unknown command")
        near = difflib.get_close_matches(command.lower()[:80], COMMANDS, n=1)
        ask = f"Did you mean {near[0]}?" if near else f"The commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"unknown command {shown(command)}. {ask}")
    parser.parse_args(argv)  # --help and --version end here
    parser.error("the command must come first")


def _make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of ``accel-scaler``, and those of its commands, still without arguments."""
    parser = argparse.ArgumentParser(
        prog="accel-scaler",
        description="fp16 training in Hugging Face Accelerate: losses scaled, overflows told of.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"%(prog)s {__version__}"
    parser.add_argument("--version", action="version", version=version, help="say the version")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    return parser, {name: commands.add_parser(name, help=says) for name, says in COMMANDS.items()}
