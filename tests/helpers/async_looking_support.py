"""Rules of the random asynchronous histories: what looks at parameters, and what is saved."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from async_training_support import Training
from async_twin_support import LAYERS
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from references import same
from torch import Tensor, nn


class Looking(Training):
    """What looks at parameters, or changes them from outside; what is saved, and loaded again."""

    @rule(which=st.integers(0, 7))
    def read(self, which: int) -> None:
        """One parameter, through an operation; in delayed that is no fence."""
        p, q = self.pairs[which % len(self.pairs)]
        assert torch.equal(p + 0, q + 0)
        self.seen["read"] += 1

    @rule(training=st.booleans())
    def evaluate(self, training: bool) -> None:
        self.count += 1
        self.ours.net.train(training)
        self.twin.publish_all()
        with torch.no_grad():
            mine, other = self.ours.loss(self.count, LAYERS), self.loss_of_twin(LAYERS)
        self.ours.net.train()
        assert repr(mine.item()) == repr(other.item())
        self.seen["evaluation"] += 1

    @rule()
    def synchronize(self) -> None:
        self.synchronized()
        for p, q in self.pairs:
            assert torch.equal(p, q)
        self.seen["synchronize"] += 1

    @rule(which=st.integers(0, 7), how=st.sampled_from(["mul", "add", "copy", "element"]))
    def edit(self, which: int, how: str) -> None:
        if self.twin.setup.mode == "delayed":
            self.synchronized()
        for p in self.pairs[which % len(self.pairs)]:
            with torch.no_grad():
                if how == "mul":
                    p.mul_(0.75)
                elif how == "add":
                    p.add_(2.0**-12)
                elif how == "copy":
                    p.copy_(torch.full_like(p, 0.3))
                else:
                    p.view(-1)[0] = 0.1
        self.seen["edit"] += 1

    @rule(how=st.sampled_from(["one", "apply"]), which=st.integers(0, 7))
    def move(self, how: str, which: int) -> None:
        if self.twin.setup.mode == "delayed":
            self.synchronized()
        if how == "apply":
            self.ours.net._apply(torch.clone)
        else:
            p, _ = self.pairs[which % len(self.pairs)]
            p.data = p.data.clone()
        self.seen["move"] += 1

    @rule(which=st.integers(0, 7))
    @precondition(lambda self: not self.clips)
    def freeze(self, which: int) -> None:
        self.zero_grad("none")  # torch steps what has a gradient, frozen or not
        for p in self.pairs[which % len(self.pairs)]:
            p.requires_grad_(not p.requires_grad)
            p.grad = None
        self.seen["freeze"] += 1

    @rule()
    @precondition(lambda self: not self.clips and len(self.twin.net.extra) < 2)
    def add_group(self) -> None:
        p = self.ours.net.grow()
        self.ours.optimizers[-1].add_param_group({"params": [p], "lr": 0.03})
        self.twin.add_group()
        self.saved = None
        self.schedule()
        self.seen["add_param_group"] += 1

    @rule()
    def collect(self) -> None:
        gc.collect(0)
        self.seen["gc"] += 1

    # What is saved.

    @rule()
    def state_dict(self) -> None:
        self.twin.publish_all()
        ours = self.ours.net.state_dict()
        for name, value in self.twin.net.state_dict().items():
            assert torch.equal(ours[name], value), name
        for number in self.numbers:
            self.compare_state(number, self.ours.optimizers[number].state_dict())
        self.seen["state_dict"] += 1

    def compare_state(self, number: int, saved: dict[str, Any]) -> None:
        self.twin.follow(number)
        for index, (p, entry) in enumerate(
            zip(self.twin.owned[number], self.twin.entries(number), strict=True)
        ):
            mine = dict(saved["state"].get(index, {}))
            master = mine.pop("master", None)
            assert _plain(mine).keys() == _plain(entry).keys(), (index, mine, entry)
            assert same(_plain(mine), _plain(entry)), (index, mine, entry)
            if master is not None:
                assert torch.equal(master, self.twin.masters[p]), index

    @rule()
    @precondition(lambda self: not self.is_open() and not self.clips)
    def save(self) -> None:
        self.synchronized()
        for number in self.numbers:
            self.twin.follow(number)
        self.saved = copy.deepcopy(
            (
                self.ours.net.state_dict(),
                [optimizer.state_dict() for optimizer in self.ours.optimizers],
                self.ours.scaler.state_dict(),
                self.twin,
            )
        )
        self.seen["save"] += 1

    @rule(model_first=st.booleans())
    @precondition(lambda self: self.saved is not None and not self.is_open() and not self.clips)
    def go_back(self, model_first: bool) -> None:
        """Load what was saved some time ago into the same pair."""
        self.zero_grad("none")
        net, states, scaler, _ = copy.deepcopy(self.saved)
        if model_first:
            self.ours.net.load_state_dict(net)
        for optimizer, state in zip(self.ours.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if not model_first:
            self.ours.net.load_state_dict(net)
        self.ours.scaler.load_state_dict(scaler)
        self.restore(states)
        self.seen["go back"] += 1

    @torch.no_grad()
    def restore(self, states: list[Any]) -> None:
        before = copy.deepcopy(self.saved[-1])
        twin = self.twin
        twin.waiting = [False for _ in twin.waiting]
        twin.scale, twin.good = before.scale, before.good
        for number in self.numbers:
            counts = [e["step"] for e in states[number]["state"].values() if "step" in e]
            if counts:  # a warm-up goes on where it was saved
                twin.steps[number] = int(max(counts))
            state = before.optimizers[number].state_dict()
            twin.optimizers[number].load_state_dict(state)
            for index, (p, q) in enumerate(
                zip(twin.owned[number], before.owned[number], strict=True)
            ):
                p.copy_(q)
                kept = "master" in states[number]["state"].get(index, {})
                twin.masters[p].copy_(before.masters[q] if kept else q)
                if not twin.has_master(p):  # torch casts what it loads
                    twin.round_state(number, p)
            twin.follow(number)

    @rule()
    @precondition(lambda self: not self.attached and not self.is_open() and not self.clips)
    def go_on_in_a_fresh_pair(self) -> None:
        self.save()
        net, states, _, _ = copy.deepcopy(self.saved)
        old, self.ours = self.ours, self.ours.fresh()
        self.ours.net.load_state_dict(net)
        self.ours.optimizer.load_state_dict(states[0])
        old.close()
        self.twin.net.zero_grad()
        self.started_over()
        self.restore(states)
        self.seen["fresh pair"] += 1

    def started_over(self) -> None:
        self.twin.steps = [0 for _ in self.numbers]
        self.schedule()

    @rule(stay=st.booleans())
    @precondition(lambda self: not self.attached and not self.is_open() and not self.clips)
    def copy_all(self, stay: bool) -> None:
        """A deep copy goes on; or the original does, and the copy has not minded."""
        self.forget_gradients()
        other = copy.copy(self.ours)
        other.optimizer = copy.deepcopy(self.ours.optimizer)
        other.net, other.inner = other.optimizer.model, other.optimizer.optimizer
        other.scaler = other.optimizer.scaler
        self.twin.follow(0)
        if stay:
            other.close()
        else:
            self.ours.close()
            self.ours = other
            self.schedule()
        self.seen["copy"] += 1

    @rule()
    @precondition(lambda self: not self.clips)
    def reopen(self) -> None:
        twin = self.twin
        if self.attached and self.is_open():
            return
        if self.low and not any(map(twin.has_master, twin.net.parameters())):
            return
        if self.attached:
            self.ours.reopen()
        else:
            self.ours.close()
            assert {type(p) for p in self.ours.net.parameters()} == {nn.Parameter}
            self.ours.open()
        twin.forget_masters()
        self.started_over()
        if self.attached:
            twin.end_window()  # with the scaler
        self.seen["reopen"] += 1


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """State without the dtype of what was saved in less than float32."""
    return {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in entry.items()
        if v is not None
    }
