"""A history on the real thing: Accelerate, torch and this package, beside the model."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs
from history_model import DIRECTION, LR, START, Model, Refused, Window, f16, f32
from history_ops import Epoch, Micro, Row, Setup
from support import reset, stock_fp16_on_cpu
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from accel_scaler import OrderError, ScalerConfig, attach, detach

LIMIT_S = 60.0


class Part(nn.Module):
    """Three numbers in two parameters; ``loss = sum(w * c * (3, 4, 12))``, in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.tensor(START[:2]))
        self.one = nn.Parameter(torch.tensor(START[2:]))
        self.seen: list[list[float]] = []
        """What each forward has used."""

    def forward(self, c: Tensor) -> Tensor:
        pair, one = self.pair.half(), self.one.half()
        self.seen.append([*pair.tolist(), *one.tolist()])
        x = c[:, None] * torch.tensor(DIRECTION)
        y = (pair * x[:, :2].half()).float().sum() + (one * x[:, 2:].half()).float().sum()
        return y


class Net(nn.Module):
    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.columns = list(columns)
        self.parts = nn.ModuleList(Part() for _ in columns)

    def forward(self, batch: Tensor, used: Sequence[int]) -> Tensor:
        losses = [
            part(batch[:, column])
            for part, column in zip(self.parts, self.columns, strict=True)
            if column in used
        ]
        return torch.stack(losses).sum()


class Stream(IterableDataset[Tensor]):
    """Of a length that nobody knows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, self.rows)


def halved(position: int) -> float:
    return float(2.0 ** -(position % 3))


def same(what: str, got: Any, expected: Any) -> None:
    assert got == expected, f"{what}: got {got}, expected {expected}"


class Caught:
    """A thread that carries its error back."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                fn(*args)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="a history's thread", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "a thread of the history hangs"
        if self.error is not None:
            raise self.error


class World:
    """An accelerator with what it has prepared."""

    def __init__(self, setup: Setup, model: Model, folder: Path) -> None:
        reset()
        self.setup, self.model, self.folder = setup, model, folder
        self.trainers = [threading.current_thread()] * setup.optimizers
        """Where the last step of each optimizer was."""
        handlers: list[Any] = []
        if setup.stock == "kwargs":
            handlers = [
                GradScalerKwargs(init_scale=setup.init_scale, growth_interval=setup.growth_interval)
            ]
        self.accelerator: Any = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            kwargs_handlers=handlers,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=setup.accumulation, sync_with_dataloader=setup.sync_with_dataloader
            ),
        )
        if setup.stock != "none":
            stock_fp16_on_cpu(self.accelerator)
        columns = range(setup.optimizers)
        nets = [Net(columns)] if setup.shared else [Net([i]) for i in columns]
        self.parts: list[Any] = [part for net in nets for part in net.parts]
        inner = [
            torch.optim.SGD(
                list(part.parameters()), lr=LR, momentum=setup.momentum, fused=setup.fused
            )
            for part in self.parts
        ]
        schedules = [LambdaLR(o, halved) for o in inner]
        self.attach()
        prepared = self.accelerator.prepare(*nets, *inner, *schedules)
        self.nets = list(prepared[: len(nets)])
        self.optimizers = list(prepared[len(nets) : len(nets) + len(inner)])
        self.schedules = list(prepared[len(nets) + len(inner) :])

    def may_publish(self) -> bool:
        """In ``delayed`` only the thread that trains may, or any once that one is gone."""
        return all(
            own.shown is own.w or trainer is threading.current_thread() or not trainer.is_alive()
            for own, trainer in zip(self.model.optimizers, self.trainers, strict=True)
        )

    def attach(self) -> None:
        setup, model = self.setup, self.model
        more: dict[str, Any] = {}
        if setup.stock != "kwargs":
            more = {"init_scale": setup.init_scale, "growth_interval": setup.growth_interval}
        if setup.bounds is not None:
            more |= {"min_scale": setup.bounds[0], "max_scale": setup.bounds[1]}
        if setup.telemetry:
            more["telemetry"] = str(self.folder / "run.jsonl")
        config = ScalerConfig(
            step_mode=model.mode,
            offload=model.offload,
            delay_warmup_steps=model.warmup,
            delay_compensation=model.compensation,
            hysteresis=setup.hysteresis,
            optimizer_threads=1,
            **more,
        )
        attach(self.accelerator, config)
        self.claim()
        self.since = len(model.windows)

    def claim(self) -> None:
        """This thread trains."""
        self.trainers = [threading.current_thread()] * self.setup.optimizers

    def go_on(self, used: Sequence[int], in_threads: bool) -> bool:
        """A training forward of each model that is in use; whether any sees again what a fence has
        taken from it. On another thread than the one that trains none does."""
        found = False
        nets = [net for net in self.nets if not set(used).isdisjoint(net.columns)]
        for i in (column for net in nets for column in net.columns):
            trainer = self.trainers[i]
            if not trainer.is_alive() and not in_threads:
                self.trainers[i] = trainer = threading.current_thread()
            if not trainer.is_alive() or (trainer is threading.current_thread() and not in_threads):
                found = self.model.optimizers[i].go_on() or found
        return found

    def switch(
        self, mode: str, offload: str = "none", warmup: int = 0, compensation: str = "none"
    ) -> None:
        """Detach, and attach again unless ``mode`` is ``stock``."""
        if self.model.phase == "open":
            self.drop_gradients()
        saved = self.accelerator.scaler.state_dict()
        detach(self.accelerator)
        self.model.switch(mode, offload, warmup, compensation)
        if mode != "stock":
            self.attach()
            if self.setup.stock == "none":  # nobody else has kept the scale
                self.accelerator.scaler.load_state_dict(saved)

    def drop_gradients(self) -> None:
        for net in self.nets:
            net.zero_grad(set_to_none=True)
        if self.model.attached:
            self.accelerator.scaler.abandon_window()

    def close(self, failed: bool = False) -> None:
        if not failed:
            self.check_records()
        if self.model.attached:
            self.accelerator.scaler.abandon_window()
            detach(self.accelerator)

    # One micro-batch.

    @property
    def numbers(self) -> range:
        """Optimizers in use: stock scales more than one wrongly."""
        return range(self.setup.optimizers if self.model.attached else 1)

    def backward(self, batch: Tensor, used: Sequence[int], plain: bool = False) -> None:
        """A backward for each model."""
        for net in self.nets:
            own = [i for i in used if i in net.columns]
            if own and plain and self.model.attached:
                self.accelerator.scaler.scale(net(batch, own)).backward()
            elif own:
                # The sum over micro-batches, not their mean: whole numbers stay whole.
                self.accelerator.backward(net(batch, own) * self.setup.accumulation)

    def in_threads(self, batch: Tensor, used: Sequence[int], plain: bool) -> None:
        """Each row in a thread of its own."""
        started = [Caught(self.backward, row[None], used, plain) for row in batch]
        for thread in started:
            thread.finish()

    def micro_batch(self, batch: Tensor, micro: Micro, op: Epoch, is_last: bool) -> list[str]:
        """Returns what has happened, for the count."""
        model, accelerator = self.model, self.accelerator
        used = [i for i in self.numbers if i in micro.used or not model.attached]
        with accelerator.accumulate(*self.nets):
            ends = model.micro_batch(is_last)
            same("sync_gradients", accelerator.sync_gradients, ends)
            same("the count of micro-batches", accelerator.step, model.counter)
            rows = [tuple(row) for row in batch.tolist()]
            again = self.go_on(used, micro.threads)
            shown = [[f16(w) for w in own.shown] for own in model.optimizers]
            if micro.threads:
                self.in_threads(batch, used, micro.plain)
                for row in rows if used else ():
                    model.backward([row], used)
            else:
                self.backward(batch, used, micro.plain)
                if used:
                    model.backward(rows, used)
            for i in used:
                for seen in self.parts[i].seen:
                    same(f"what the forward of model {i} saw", seen, shown[i])
                self.parts[i].seen.clear()
            self.check_gradients(model.scale if model.phase == "open" else 1.0)
            if micro.peek:
                Caught(self.peek).finish()
            happened = self.boundary(micro, op.zeroes, batch, used) if ends else self.between(micro)
        self.check_state()
        return [*happened, *["shown again"] * again, *self.note(batch, micro, op, used)]

    def note(self, batch: Tensor, micro: Micro, op: Epoch, used: list[int]) -> list[str]:
        several, bad = len(batch) > 1, not bool(batch.isfinite().all())
        return [
            name
            for name, true in {
                "no backward": not used,
                "backward in threads": micro.threads and several and used,
                "peeked": micro.peek,
                "inf or nan in the data": bad,
                "in another thread": op.thread,
                "iterable": op.iterable,
                "short batch": 0 < len(batch) < op.batch,
                "scaled by hand": micro.plain and used and self.model.attached,
                "one model idle": 0 < len(used) < len(self.numbers),
            }.items()
            if true
        ]

    def peek(self) -> None:
        scaler = self.accelerator.scaler
        same("the scale, in a thread", scaler.get_scale(), self.model.scale)
        same("the count, in a thread", scaler.state_dict()["_growth_tracker"], self.model.good)
        if self.model.attached:
            found = len(self.accelerator.scaler_history.records)
            same("records, in a thread", found, len(self.model.windows) - self.since)

    def read(self, stop: threading.Event) -> None:
        """On a thread of its own: what a monitor does beside the training."""
        scaler = self.accelerator.scaler
        while not stop.wait(0.0005):
            for part in self.parts:
                for p in part.parameters():
                    assert math.isfinite(float(p.detach().norm()))
            assert scaler.get_scale() > 0
            assert scaler.state_dict()["scale"] > 0
            self.accelerator.scaler_history.summary()
            try:
                for net in self.nets:
                    net.state_dict()
                for optimizer in self.optimizers:
                    optimizer.synchronize()
            except OrderError:  # would publish beneath a forward
                assert self.model.mode == "delayed"
            except RuntimeError as error:  # torch's: a first step puts hooks on what it walks
                if "mutated during iteration" not in str(error):
                    raise

    def between(self, micro: Micro) -> list[str]:
        """Off the boundary the script calls the same things."""
        if micro.end.startswith("clip") and self.model.attached and self.model.phase == "open":
            chosen = self.model.optimizers
            norm = self.accelerator.clip_grad_norm_(self.parameters(self.numbers), micro.limit)
            if not any(own.bad for own in chosen):
                expected = f32(math.sqrt(sum(own.norm_squared() for own in chosen)))
                same("the norm so far", float(norm), expected)
        for i in self.numbers:
            self.optimizers[i].step()
            self.schedules[i].step()
            self.optimizers[i].zero_grad()
        return ["off the boundary"]

    def boundary(self, micro: Micro, how: str, batch: Tensor, used: Sequence[int]) -> list[str]:
        model, happened = self.model, ["boundary"]
        happened += [micro.end or "no clip"] if model.attached else ["boundary in stock"]
        if model.phase == "open":
            happened += self.unscale_by_hand(micro)
            self.clip(micro)
            happened += self.drop(micro, how, batch, used)
        before = len(model.windows)
        views = [
            [p.grad.detach() for p in self.parts[i].parameters() if p.grad is not None]
            for i in (self.numbers if how == "views" else ())
        ]
        for i in self.numbers:
            refused = expected = False
            try:
                model.step(i)
            except Refused:
                expected = True
            try:
                self.optimizers[i].step()
            except OrderError:
                refused = True
            same(f"whether step {i} is refused", refused, expected)
            if not refused and model.optimizers[i].grad is not None:
                self.trainers[i] = threading.current_thread()
            skipped = model.optimizers[i].skipped
            same(f"step_was_skipped of {i}", self.optimizers[i].step_was_skipped, skipped)
            self.schedules[i].step()
            model.optimizers[i].position += not skipped
            happened += ["refused"] if refused else ["skipped"] if skipped else []
        for i in self.numbers:
            self.zero(i, how, self.optimizers[i], views[i] if views else ())
        happened += [f"zeroed: {how}"]
        flags = {model.optimizers[i].skipped for i in self.numbers if i in model.stepped}
        happened += ["one of them skipped"] if len(flags) == 2 else []
        happened += ["window"] * (len(model.windows) - before)
        grew = model.windows[before:] and model.windows[-1].next_scale > model.windows[-1].scale
        return [*happened, *(["grew"] if grew else [])]

    def zero(self, number: int, how: str, optimizer: Any, views: Sequence[Tensor] = ()) -> None:
        """Of one model: it matters who does it while a step beside still reads the gradients.

        ``views``: of the gradients, taken before the step; they wait for nothing.
        """
        grads = [p.grad for p in self.parts[number].parameters() if p.grad is not None]
        if how == "model":
            self.parts[number].zero_grad()
        elif how in ("by hand", "views"):
            for grad in views or grads:
                grad.zero_()
        elif how == "data":
            for grad in grads:
                grad.data.zero_()
        elif how == "foreach" and grads:
            torch._foreach_zero_(grads)
        elif how in ("none", "zeros"):
            optimizer.zero_grad(set_to_none=how == "none")
        self.model.optimizers[number].zero(to_none=how in ("none", "model"))

    def parameters(self, which: Sequence[int]) -> list[Tensor]:
        return [p for i in which for p in self.parts[i].parameters()]

    def unscale_by_hand(self, micro: Micro) -> list[str]:
        model, happened = self.model, []
        for i in self.numbers if micro.by_hand and model.attached else ():
            if model.optimizers[i].grad is not None:
                chosen = self.optimizers[i]
                chosen = chosen.optimizer if micro.by_hand == "wrapped" else chosen
                self.accelerator.scaler.unscale_(chosen)
                model.optimizers[i].unscaled = True
                happened = [f"unscaled by hand, {micro.by_hand}"]
        if happened:
            self.check_gradients(1.0)
        return happened

    def drop(self, micro: Micro, how: str, batch: Tensor, used: Sequence[int]) -> list[str]:
        """Give up what the last backward left, and make it again."""
        model = self.model
        some = list(used) if micro.drop == "all" else list(used)[:1]
        if not (micro.drop and some and model.attached):
            return []
        if micro.drop == "all":
            some = list(self.numbers)
        for i in some:
            self.zero(i, how, self.optimizers[i].optimizer)
        again = [i for i in used if i in some]
        self.backward(batch, again, micro.plain)
        model.backward([tuple(row) for row in batch.tolist()], again)
        for i in again:
            self.parts[i].seen.clear()
        self.clip(micro, some)  # the others' are not whole numbers any more
        return [f"dropped {micro.drop}", f"dropped after {micro.end or 'no clip'}"]

    def replace_state(self) -> None:
        """Another tensor in the optimizer's state, as who averages optimizers does."""
        for i in self.numbers if self.setup.momentum else ():
            if self.model.attached:
                self.optimizers[i].synchronize()
            self.model.publish(i)
            for p in self.parts[i].parameters():
                entry = self.optimizers[i].state.get(p, {})
                if entry.get("momentum_buffer") is not None:
                    entry["momentum_buffer"] = entry["momentum_buffer"] * 2.0
            self.model.optimizers[i].double_momentum()

    def clip(self, micro: Micro, only: Sequence[int] | None = None) -> None:
        model, numbers = self.model, list(self.numbers if only is None else only)
        if micro.end == "unscale":
            for i in numbers:
                if model.optimizers[i].grad is not None:
                    self.accelerator.unscale_gradients(self.optimizers[i])
                    model.measure(i)
                    model.optimizers[i].unscaled = True
            self.check_gradients(1.0)
            return
        sets = {
            "clip each": [[i] for i in numbers],
            "clip all": [numbers],
            "clip first": [[0][: numbers[0] == 0]],
        }
        for which in filter(None, sets.get(micro.end, [])):
            grads = [model.optimizers[i].grad for i in which]
            if not model.attached and None in grads:
                continue
            norm = self.accelerator.clip_grad_norm_(self.parameters(which), micro.limit)
            expected = model.clip(which, micro.limit)
            if model.attached or math.isfinite(expected):
                same("the norm", float(norm), expected)
            else:
                assert not math.isfinite(norm)

    # What must agree.

    def check_gradients(self, scale: float) -> None:
        for i, own in enumerate(self.model.optimizers):
            grads = [p.grad for p in self.parts[i].parameters()]
            if own.grad is None:
                same(f"gradients of {i}", grads, [None, None])
            elif not own.bad:
                found = [g for grad in grads if grad is not None for g in grad.tolist()]
                same(f"gradients of {i}", found, [g * scale for g in own.grad])

    def check_state(self) -> None:
        """What can be seen without waiting for anything."""
        model, scaler = self.model, self.accelerator.scaler
        same("the scale", scaler.get_scale(), model.scale)
        same("the growth tracker", scaler.state_dict()["_growth_tracker"], model.good)
        for i, own in enumerate(model.optimizers):
            same(f"the schedule of {i}", self.schedules[i].scheduler.last_epoch, own.position)
            same(f"lr of {i}", self.optimizers[i].param_groups[0]["lr"], own.lr)

    def check_weights(self) -> None:
        """Everything, finished."""
        for i, own in enumerate(self.model.optimizers):
            if self.model.attached:
                self.optimizers[i].synchronize()
            self.model.publish(i)
            same(f"weights of {i}", torch.cat(list(self.parts[i].parameters())).tolist(), own.w)
            state = self.optimizers[i].state
            buffers = [state[p].get("momentum_buffer") for p in self.parts[i].parameters()]
            if own.momentum is None:
                same(f"momentum of {i}", buffers, [None, None])
            else:
                found = [m for b in buffers if b is not None for m in b.tolist()]
                same(f"momentum of {i}", found, own.momentum)

    def check_records(self) -> None:
        if not self.model.attached:
            return
        found = [
            Window(r.scale, r.next_scale, r.skipped, r.grad_norm, list(r.lr))
            for r in self.accelerator.scaler_history.records
        ]
        same("records", found, self.model.windows[self.since :])

    def evaluate(self) -> None:
        """A forward without gradients sees the newest."""
        self.model.publish()
        with torch.no_grad():
            for net in self.nets:
                net(torch.zeros(1, 3), net.columns)
        for part, own in zip(self.parts, self.model.optimizers, strict=True):
            same("what an evaluation saw", part.seen, [[f16(w) for w in own.w]])
            part.seen.clear()

    def compare_state_dicts(self) -> None:
        self.model.publish()
        for net in self.nets:
            state = net.state_dict()
            for n, i in enumerate(net.columns):
                found = [*state[f"parts.{n}.pair"].tolist(), *state[f"parts.{n}.one"].tolist()]
                same(f"saved weights of {i}", found, self.model.optimizers[i].w)

    # Checkpoints.

    def by_hand(self) -> list[Any]:
        kinds = (self.nets, self.optimizers, self.schedules, [self.accelerator.scaler])
        return copy.deepcopy([[each.state_dict() for each in kind] for kind in kinds])

    def load_by_hand(self, saved: list[Any], model_first: bool) -> None:
        nets, optimizers, schedules, (scaler,) = copy.deepcopy(saved)
        pairs = [(self.nets, nets), (self.optimizers, optimizers), (self.schedules, schedules)]
        for kind, states in pairs if model_first else reversed(pairs):
            for each, state in zip(kind, states, strict=True):
                each.load_state_dict(state)
        self.accelerator.scaler.load_state_dict(scaler)
