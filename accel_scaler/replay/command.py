"""``accel-scaler replay``: what is in a file of ``save_overflow``, and the same run again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from glob import escape
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .. import console
from ..errors import ConfigError, listed
from ..integrations import prepare_alone
from ..overflow_finder import (
    PostMortem,
    Replay,
    as_then,
    read,
    recorded,
    run_again,
    surroundings,
)
from ..precision import ChosenModules
from .model import adopt, make_model, read_weights

MOST_NAMED = 5
MOST_LINES = 40
LONGEST_LINE = 2000

PRECISIONS = ("fp16", "bf16", "no")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``accel-scaler replay`` to a parser."""
    parser.description = (
        "Run the window again that training with save_overflow=DIR has saved, and say where it "
        "overflows. Without --model: say what is in the file. Exit status 0: the same, bit for "
        "bit (with --fp32: cured); 1: not; 2: it cannot be run."
    )
    parser.add_argument("file", metavar="overflow.pt", help="written by save_overflow=DIR")
    parser.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="what returns the model: a function without arguments, in a file or as "
        "package.module:function. This code is run",
    )
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="load these and not those of the file: a file, or a folder of safetensors",
    )
    parser.add_argument(
        "--fp32",
        action="append",
        default=[],
        metavar="GLOB",
        help="run these modules in float32, by name, and say whether that cures it; may be "
        "repeated",
    )
    parser.add_argument(
        "--device", choices=("cpu", "accelerator"), help="where to run (default: as in the file)"
    )


def run(args: argparse.Namespace) -> int:
    """Do what ``add_arguments`` describes: 0, or 1 where it is not the same.

    Raises:
        ConfigError: a file, a model or weights that cannot be used, in one line.
    """
    if args.model is None and (args.fp32 or args.weights or args.device):
        raise ConfigError("replay: --fp32, --weights and --device need --model.")
    file = read(args.file)
    for line in _told(file):
        say(line)
    device = torch.device("cpu")
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = file.about.get("device")
    if args.device != "cpu" and present is not None and (args.device or kind != "cpu"):
        device = present
    elif args.device == "accelerator":
        raise ConfigError("--device accelerator: there is none here.")
    different = _different(file, device)
    if different:
        say("here it differs: " + "; ".join(different))
    if args.model is None:
        return 0
    precision = file.about.get("precision")
    if precision not in PRECISIONS:
        raise ConfigError(f"{args.file}: damaged: precision.")
    model = make_model(args.model)
    weights = None if args.weights is None else read_weights(args.weights)
    adopt(model, file, weights)
    if weights is None and file.weights is None:
        say("The weights are those that --model gives: the file has none.")
    model, around = prepare_alone(model, str(precision), on_cpu=device.type == "cpu")
    with as_then(file.about):
        return _replay(file, model, around, args.fp32, different)


def say(text: str) -> None:
    """One line, of bounded length, whatever a file has put into it."""
    indent = "  " if text.startswith("  ") else ""
    console.say(indent + " ".join(text.split())[:LONGEST_LINE])


def _replay(
    file: PostMortem,
    model: Module,
    around: Callable[[], AbstractContextManager[None]],
    fp32: list[str],
    different: list[str],
) -> int:
    then, now = ChosenModules(map(escape, file.fp32_modules)), ChosenModules(fp32)
    for chosen in (then, now):
        chosen.put_on(model)
        chosen.refuse_unmatched([model])
    recording = recorded(file, model)
    try:
        found = run_again(recording, around, cures=bool(fp32))
    except Exception as error:  # the model's own, of inputs that are perhaps not for it
        raise ConfigError(
            f"the model raised {type(error).__name__} in the replay: {error}"
        ) from error
    finally:
        recording.close()
    if fp32:
        names = ", ".join(now.names)
        if found.is_finite:
            say(f"With {names} in float32 all is finite: it is cured, at this scale.")
            return 0
        say(f"With {names} in float32 it still overflows: {_sentence(found)}")
        return 1
    wrong = list(_wrong(file, found))
    if not wrong:
        say(f"The same verdict, bit for bit: {file.origin['text']}")
        return 0
    say("Not the same:")
    for line in wrong:
        say(f"  {line}")
    if different:
        say(f"  perhaps because of {'; '.join(different)}")
    return 1


def _told(file: PostMortem) -> Iterator[str]:
    """What is in it."""
    about = file.about
    yield (
        f"window {about.get('window')}, rank {about.get('rank')} of {about.get('ranks')}, scale "
        f"{about.get('scale')}, {about.get('precision')} on {about.get('device')}"
    )
    yield f"began in: {file.origin['text']}"
    bad = file.nonfinite
    yield f"gradients with inf or NaN: {listed(bad[:MOST_NAMED], len(bad)) or 'none'}"
    count = len(file.shapes)
    held = "" if file.weights is not None else ", not in the file"
    yield f"model: {file.model}, {count} parameters and buffers{held}"
    if file.fp32_modules:
        chosen = file.fp32_modules
        yield f"in float32: {listed(chosen[:MOST_NAMED], len(chosen))}"
    lines = [
        f"  {name}: {_in_words(value)}"
        for call in file.calls
        for name, value in (*enumerate(call["args"]), *call["kwargs"].items())
    ]
    yield f"{len(file.calls)} forward(s) of it, given"
    yield from lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        yield f"  and {len(lines) - MOST_LINES} more"
    yield from file.notes


def _in_words(value: Any, deep: int = 0) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        if deep:
            return f"{type(value).__name__} of {len(value)}"
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        texts = [f"{key}: {_in_words(each, 1)}" for key, each in items[:MOST_NAMED]]
        return f"{type(value).__name__}({listed(texts, len(items))})"
    return f"{type(value).__name__} {str(value)[:40]}" if value is not None else "None"


def _different(file: PostMortem, device: torch.device) -> list[str]:
    """Of versions, device and switches; the last are set as they were."""
    here, there = surroundings(device), file.about
    return [
        f"{name} was {there[name]}, is {value}"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


def _wrong(file: PostMortem, found: Replay) -> Iterator[str]:
    yield from found.differences
    if found.origin is None:
        yield f"nothing began to overflow; it was: {file.origin['text']}"
    elif found.origin.as_json() != file.origin:
        yield f"it was: {file.origin['text']}"
        yield f"it is: {found.origin.text}"
    was, now = set(file.nonfinite), set(found.nonfinite)
    if was - now:
        names = sorted(was - now)
        yield f"finite gradients now: {listed(names[:MOST_NAMED], len(names))}"
    if now - was:
        names = sorted(now - was)
        yield f"inf or NaN only now: {listed(names[:MOST_NAMED], len(names))}"


def _sentence(found: Replay) -> str:
    if found.origin is not None:
        return found.origin.text
    names = sorted(found.nonfinite)
    return f"gradients of {listed(names[:MOST_NAMED], len(names))}"
