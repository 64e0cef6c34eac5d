"""The command ``accel-scaler``: its subcommands, and errors on one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .console import plain
from .errors import AccelScalerError

__all__ = ["main"]

LAUNCH = "start an unchanged script, attached; takes what `accelerate launch` takes"
DOCTOR = "say what a launch would do here, and what would go wrong; takes what launch takes"
REPLAY = "run a window again that overflowed, from the file that save_overflow has written"
REPORT = "draw what the scaler did, from telemetry files"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``accel-scaler``; returns the exit status.

    0: done. 2: a wrong argument, setting or file, one line on stderr. ``launch`` returns the status
    of the process that failed first; ``doctor`` 1 for a wrong setting, ``replay`` for another
    verdict than in the file. 130 after Ctrl-C.
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
    if argv[:1] == ["launch"]:
        # Its arguments are Accelerate's business, which costs a while to import.
        from .launch.launcher import main as launch

        return launch(argv[1:])
    if argv[:1] == ["doctor"]:
        from .doctor import main as doctor

        return doctor(argv[1:])
    parser = argparse.ArgumentParser(
        prog="accel-scaler", description="fp16 training in Hugging Face Accelerate."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("launch", help=LAUNCH, add_help=False)
    commands.add_parser("doctor", help=DOCTOR, add_help=False)
    report_parser = commands.add_parser("report", help=REPORT)
    replay_parser = commands.add_parser("replay", help=REPLAY)
    if argv[:1] == ["replay"]:
        from . import replay

        replay.add_arguments(replay_parser)
        return replay.run(parser.parse_args(argv))
    if argv[:1] != ["report"]:
        parser.parse_args(argv)
        parser.error("the command must come first")
    from . import report

    report.add_arguments(report_parser)
    return report.run(parser.parse_args(argv))
