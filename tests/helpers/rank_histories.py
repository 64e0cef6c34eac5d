"""Random histories of two gloo ranks: no rank waits for one that does not come, and every number is
that of plain torch on the same ranks.

A *history* is a ``Setup`` and its *windows*, drawn from a seed. Both ranks get the same one, each
does its own part in it, and each compares two *sides*: ``Ours`` and ``Plain`` (``rank_sides.py``).
A *pair* is two processes that play histories until one fails. A history that takes 20 s hangs: both
stacks are in what is found, and the next one has a new pair.

    python tests/helpers/rank_histories.py --seed 100 --runs 1000
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # FSDP2 would import it in each process, for seconds
import torch.distributed as dist
from children import RANKS, become_rank, free_port, start
from histories import as_test
from rank_sides import FIRST, LIMIT, NORMS, TIMES, Ours, Plain, Raised, Setup, Window
from support import same

from accel_scaler.optimizer_step import spikes

LIMIT_S = 20.0
"""A history takes less than a second."""
History = tuple[Setup, list[Window]]


def draw(r: random.Random) -> History:
    setup = Setup(
        wrap=r.choice(["ddp", "ddp", "ddp", "fsdp2", "tensor"]),
        alone=r.choice(["", "", "", "", "apart", "apart", "within", "ignored"]),
        sharded=r.random() < 0.3,
        group=r.choice(["", "", "", "join", "join", "local"]),
        missing=r.choice([(0, 1), (0, 3), (2, 0)]),
        after=r.choice([0, 0, 2]),
        precision=r.choice(["fp16", "fp16", "fp16", "bf16", "no"]),
        low=r.random() < 0.2,
        micro=r.choice([1, 2]),
        scale=r.choice([1024.0, 65536.0]),
        mode=r.choice(["sync", "sync", "overlap"]),
        clip=r.choice(["", "", "all", "model", "each", "value"]),
        early=r.random() < 0.3,
        limit=r.choice([None, None, LIMIT, f"{TIMES:g}x"]),
        retry=r.random() < 0.5,
        heal=r.random() < 0.2,
        find=r.choice(["auto", "auto", "replay", "always", "off"]),
        unlike=r.random() < 0.1,
        telemetry=r.choice([(), (), (0,), (1,), (0, 1)]),
    )
    bad = ["", "", "", "inf", "nan", "loud", "loud", "alone", "alone loss", "shard"]
    windows = []
    for _ in range(r.randrange(4, 9)):
        given: Any = {"bad": r.choice(bad), "on": r.choice([(0,), (1,), (0, 1)])}
        given |= {"at": r.randrange(setup.micro), "no_sync": r.random() < 0.15}
        windows.append(Window(**given))
    if r.random() < 0.15:
        at, how = r.randrange(1, len(windows)), r.choice(["forward", "again", "step"])
        bad_there = "loud" if how == "again" else ""
        windows[at] = Window(bad_there, on=(r.randrange(RANKS),), raises=how)
    return possible(setup, windows)


def possible(setup: Setup, windows: Sequence[Window]) -> History:
    """Without what torch, Accelerate or a setting forbids, or has no meaning."""
    if setup.has_shards:
        alone = setup.alone.replace("ignored", "within")
        setup = replace(setup, group="", low=False, alone=alone, early=setup.early and setup.scaled)
    if setup.group != "join":
        setup = replace(setup, missing=(0, 0), after=setup.after if setup.group else 0)
    if setup.group == "local" and setup.alone == "ignored":
        setup = replace(setup, alone="within")  # it would be averaged
    if not setup.scaled:
        setup = replace(setup, retry=False, heal=False, scale=1.0)
    if setup.group or not setup.alone:  # refused, and senseless
        setup = replace(setup, sharded=False)
    if setup.heal and setup.find == "off":
        setup = replace(setup, find="replay")
    if setup.low:
        setup = replace(setup, mode="sync")
    if setup.limit and setup.clip == "all" and setup.alone == "apart":
        setup = replace(setup, clip="each")  # the norm of all is not the norm of each
    # A window that overflows by its scale is not made again here.
    is_kept = setup.retry and bool(setup.alone or setup.group == "join")
    if is_kept:
        setup = replace(setup, scale=1024.0)
    found, many = [], len(windows) - setup.after
    for number, window in enumerate(windows):
        bad, raises = window.bad, window.raises
        if bad == "loud" and is_kept:
            bad = "inf"
        if bad.startswith("alone"):
            # Ranks agree on shards, and not on what one of them clips together with these.
            is_torn = setup.has_shards and setup.clip == "all" and setup.alone == "apart"
            bad = "" if not setup.alone or (is_torn and not setup.sharded) else bad
        if bad == "shard" and not setup.has_shards:
            bad = ""
        if raises and many - setup.missing[window.on[0]] <= number < many:  # it is out of inputs
            raises = ""
        is_same = setup.wrap == "tensor" and bad in ("inf", "nan", "loud") and not raises
        on = (0, 1) if is_same else window.on  # ranks have the same batch
        no_sync = window.no_sync and not setup.has_shards
        found.append(replace(window, bad=bad, on=on, no_sync=no_sync, raises=raises))
    return setup, found


@dataclass
class Answer:
    """A rank's: the sides are the ``same``, one ``differs``, it ``raised`` as it should, or another
    ``error``, or it ``hangs``; what more there is to say, and what happened."""

    what: str
    text: str = ""
    events: list[str] = field(default_factory=list)


def compare(history: History, folder: str) -> Answer:
    """On each rank: play both sides."""
    setup, windows = history
    end = next((n for n, window in enumerate(windows) if window.raises), len(windows))
    plain, ours = Plain(setup), Ours(setup, folder)
    plain.play(windows, end)
    answer = Answer("same")
    try:
        ours.play(windows, len(windows))
        answer.events = ours.close()
    except Raised:
        answer = Answer("raised")
    except Exception:
        answer = Answer("error", traceback.format_exc())
    names = ("losses", "skipped", "scale", "lr")
    for number, (mine, other) in enumerate(zip(ours.seen, plain.seen)):  # noqa: B905
        found = [each for each in zip(names, mine, other, strict=True) if not same(*each[1:])]
        text = "; ".join(f"{name}: got {a}, expected {b}" for name, a, b in found)
        if found:
            return Answer("differs", f"window {number} of this rank: {text}")
    is_whole = answer.what == "same" and end == len(windows)
    if is_whole and not same(ours.parameters(), plain.parameters()):
        return Answer("differs", "the parameters at the end")
    return answer


def serve(rank: int, port: int, folder: Path, pipe: Any) -> None:
    """A rank's process."""
    logging.disable(logging.WARNING)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    become_rank(rank, port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kernels = "accel_scaler.integrations.cpu_float16.has_float16_kernels"  # torch's own products
    answer = Answer("same")
    with (
        mock.patch(kernels, return_value=True),
        mock.patch.multiple(spikes, NORMS=NORMS, FIRST=FIRST),
    ):
        while answer.what == "same":
            history = pipe.recv()
            signal.alarm(3 * int(LIMIT_S))  # it ends then, whatever becomes of the parent
            answer = compare(history, str(folder))
            pipe.send(answer)


class Pair:
    """Two processes that play histories until one fails."""

    def __init__(self, folder: Path) -> None:
        port, pipes = free_port(), [Pipe() for _ in range(RANKS)]
        self.pipes: list[Any] = [mine for mine, _ in pipes]
        self.outputs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
        self.pids = []
        for rank, (_, theirs) in enumerate(pipes):
            body = partial(serve, rank, port, folder, theirs)
            self.pids.append(start(body, self.outputs[rank]))
            theirs.close()

    def play(self, history: History, limit_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        end = time.monotonic() + limit_s
        for pipe in self.pipes:
            pipe.send(history)
        while len(answers) < RANKS and (left := end - time.monotonic()) > 0:
            due = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(due, left):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = self.pipes[rank].recv()
                except EOFError:
                    answers[rank] = Answer("error", self.outputs[rank].read_text())
        return [answers.get(rank) or self.hanging(rank) for rank in range(RANKS)]

    def hanging(self, rank: int) -> Answer:
        os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)  # until it has written its stack
        return Answer("hangs", self.outputs[rank].read_text())

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self.pipes:
            pipe.close()


def wrong(history: History, answers: Sequence[Answer]) -> str:
    """The fault of a history, "" for none. Where one rank raises, the other one has to end."""
    raises = {rank: window.raises for window in history[1] if window.raises for rank in window.on}
    fine = []
    for rank, answer in enumerate(answers):
        if rank in raises:  # perhaps nothing ran again, or that it cannot is what comes of it
            is_fine = answer.what == "raised" or (answer.what, raises[rank]) == ("same", "again")
        else:
            is_lost = bool(raises) and answer.what == "error" and "gloo" in answer.text
            is_fine = answer.what == "same" or is_lost
        fine.append(is_fine)
    texts = (f"rank {rank} {answer.what}: {answer.text}" for rank, answer in enumerate(answers))
    return "" if all(fine) else "\n".join((as_test(*history), *texts))


def play_all(
    histories: dict[str, History],
    seen: Counter[str],
    limit_s: float = LIMIT_S,
    tell: Callable[[str], object] = lambda text: None,
) -> str:
    """The faults of these histories, by name; ``seen`` counts events and answers."""
    found, pair = [], None
    with tempfile.TemporaryDirectory() as folder:
        for name, history in histories.items():
            pair = pair or Pair(Path(folder))
            answers = pair.play(history, limit_s)
            for answer in answers:
                seen.update([answer.what, *answer.events])
            if any(answer.what != "same" for answer in answers):
                pair.end()
                pair = None
            if text := wrong(history, answers):
                found.append(f"{name}: {text}")
                tell(found[-1])
        if pair is not None:
            pair.end()
    return "\n".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a history")
    given, seen = parser.parse_args(), Counter[str]()
    seeds = range(given.seed, given.seed + given.runs)
    histories = {f"seed {seed}": draw(random.Random(seed)) for seed in seeds}
    found = play_all(histories, seen, given.limit, lambda text: print(text, flush=True))
    print(f"{len(seeds)} histories: {dict(seen)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
