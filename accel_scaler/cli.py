"""The command ``accel-scaler``: its subcommands, and errors on one line.

Help and version import neither torch nor anything else that takes long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .console import plain
from .errors import AccelScalerError
from .version import __version__

EXAMPLE = """\
example:
  accel-scaler test
  accel-scaler launch --mixed_precision fp16 --telemetry run.jsonl train.py
  accel-scaler report run.jsonl

accel-scaler COMMAND --help shows the arguments of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-scaler``; returns the exit status.

    0: done. 1: a row of ``test`` failed. 2: a wrong argument, setting or file, one line on stderr.
    ``launch`` returns the status of the process that failed first. 130 after Ctrl-C.
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
    if argv[:2] in (["launch", "-h"], ["launch", "--help"]):
        from .launch.flags import own_parser

        own_parser().print_help()
        return 0
    if argv[:1] == ["launch"]:
        from .launch.launcher import main as launch

        return launch(argv[1:])
    parser = argparse.ArgumentParser(
        prog="accel-scaler",
        description="Check Accelerate's optimizer step: launch a script, report on its run.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands.add_parser("launch", help="start an unchanged script as `accelerate launch` does")
    testing = commands.add_parser("test", help="try the package on this machine; run this first")
    reporting = commands.add_parser("report", help="make a page from a telemetry file")
    if argv[:1] == ["report"]:
        from . import report

        report.add_arguments(reporting)
        return report.run(parser.parse_args(argv))
    if argv[:1] == ["test"]:
        from . import selftest

        selftest.add_arguments(testing)
        return selftest.run(parser.parse_args(argv))
    parser.parse_args(argv)  # --help, --version and errors exit here
    parser.print_help()
    return 0
