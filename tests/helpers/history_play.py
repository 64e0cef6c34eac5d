"""Plays a history of ``history_ops.py`` on the world and beside it on the model."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from async_support import lazy, one_part_each
from histories import Kind
from history_model import Model, Window
from history_ops import Epoch, Op, Restore, Save, Setup, Switch, draw_history
from history_world import Caught, Stream, World, same
from torch.utils.data import DataLoader

WORKERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "free": nullcontext,
    "parts": one_part_each,
    "lazy": lazy,
}
"""Whom the optimizer thread is: itself; in many parts; one that waits until somebody waits."""


class Player:
    """Plays operations, one after the other."""

    def __init__(self, setup: Setup, folder: Path, seen: Counter[str]) -> None:
        self.setup, self.folder, self.seen = setup, folder, seen
        self.model = Model(setup)
        self.world = World(setup, self.model, folder)
        self.saved: tuple[Model, Any] | None = None
        self.count = 0

    def play(self, op: Op) -> None:
        self.seen[type(op).__name__] += 1
        if isinstance(op, Epoch):
            if op.thread:
                Caught(self.read_epoch, op).finish()
            else:
                self.read_epoch(op)
            self.world.check_records()
        elif isinstance(op, Save):
            self.save(op.by_hand)
        elif isinstance(op, Restore):
            self.restore(op)
        elif isinstance(op, Switch):
            self.seen["attached again"] += not self.model.attached
            self.seen[f"to {op.mode} from {self.model.mode}"] += 1
            self.world.switch(op.mode, op.offload, op.warmup, op.compensation)
        elif self.setup.stock != "none" and not self.setup.fused and self.model.attached:
            self.world.switch("stock")
            self.seen["detached"] += 1
        self.world.check_state()

    def read_epoch(self, op: Epoch) -> None:
        """The reader ends before the thread that trains: after that it might publish."""
        with self.reader(op):
            self.epoch(op)

    @contextmanager
    def reader(self, op: Epoch) -> Iterator[None]:
        """Somebody reads beside the epoch, as long as it is ours that trains."""
        if not (op.reader and self.model.attached):
            yield
            return
        if not all(trainer.is_alive() for trainer in self.world.trainers):
            self.world.check_weights()  # or the reader might be the one that publishes
        stop = threading.Event()
        reading = Caught(self.world.read, stop)
        try:
            yield
        finally:
            stop.set()
        reading.finish()
        self.seen["read beside"] += 1

    def epoch(self, op: Epoch) -> None:
        stream = op.iterable and op.rows  # Accelerate refuses an empty one
        data: Any = Stream(op.rows) if stream else [torch.tensor(row) for row in op.rows]
        loader = self.world.accelerator.prepare(DataLoader(data, batch_size=op.batch))
        number = -1
        for number, batch in enumerate(loader):
            micro, is_last = op.micro(number), number == len(op.groups) - 1
            happened = self.world.micro_batch(batch, micro, op, is_last)
            self.seen.update(happened)
            partial = self.setup.accumulation > 1 and is_last and self.model.phase != "open"
            self.seen["a last, partial window"] += partial and "boundary" in happened
            self.after(micro.after)
            if micro.after == "stop":
                break
        else:
            same("batches", number + 1, len(op.groups))
            if op.rows:
                self.seen["epoch ended inside a window"] += self.model.phase == "open"

    def after(self, name: str) -> None:
        if not self.world.may_publish():
            return
        if name.startswith("save"):
            self.save(name == "save by hand")
        elif name == "evaluate":
            self.world.evaluate()
        elif name == "synchronize":
            self.world.check_weights()
        elif name == "state_dict":
            self.world.compare_state_dicts()
        elif name == "replace state":
            self.world.replace_state()
        if name:
            self.seen[name] += 1

    def save(self, by_hand: bool) -> None:
        pending = any(own.shown is not own.w for own in self.model.optimizers)
        self.seen["saved with an update held back"] += pending
        self.seen["saved inside a window"] += self.model.phase == "open"
        self.count += 1
        state: Any = self.folder / str(self.count % 2)
        if by_hand:
            state = self.world.by_hand()
        else:
            self.world.accelerator.save_state(str(state))
        self.saved = self.model.saved(), state

    def restore(self, op: Restore) -> None:
        if self.saved is None:
            return
        model, state = self.saved
        if op.fresh:
            self.world.close()
            self.model.attached = True
            self.world = World(self.setup, self.model, self.folder)
        else:
            self.world.drop_gradients()
        if isinstance(state, Path):
            self.world.accelerator.load_state(str(state))
        else:
            self.world.load_by_hand(state, op.model_first)
        self.world.claim()
        self.model.restore(model, fresh=op.fresh, counter=isinstance(state, Path))
        self.world.check_weights()
        self.seen["restored, fresh" if op.fresh else "restored"] += 1

    def finish(self) -> None:
        self.world.check_weights()
        self.world.close()
        if self.setup.telemetry:
            lines = [json.loads(line) for line in (self.folder / "run.jsonl").open()]
            found = [
                Window(r["scale"], r["next_scale"], r["skipped"], r["grad_norm"], r["lr"])
                for r in lines
                if r["kind"] == "window"
            ]
            same("the telemetry file", found, self.model.windows)
            self.seen["records in a file"] += len(found)


def play(setup: Setup, ops: Sequence[Op], seen: Counter[str] | None = None) -> None:
    """Play a history; raises AssertionError where the real thing differs from the model."""
    seen = Counter() if seen is None else seen
    with WORKERS[setup.worker](), tempfile.TemporaryDirectory() as folder:
        player = Player(setup, Path(folder), seen)
        done = False
        try:
            for op in ops:
                player.play(op)
            player.finish()
            done = True
        finally:
            if not done:
                player.world.close(failed=True)


KIND = Kind(draw_history, play)
