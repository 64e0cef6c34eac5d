"""Loops without an accelerator, with any class of optimizer, on any device."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel_scaler import offloaded

STEPS = 8


class Loop:
    """One run; ``seen`` has its losses and norms. ``watched``: the offloaded class knows the
    model."""

    def __init__(
        self, cls: Any, device: str, *, offload: bool, watched: bool = False, **kwargs: Any
    ) -> None:
        self.device = torch.device(device)
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 8))
        self.net = net.to(device)
        made = offloaded(cls, self.net if watched else None) if offload else cls
        *self.own, self.late = self.net.parameters()
        self.late.requires_grad_(False)
        self.optimizer: Any = made(self.own, **kwargs)
        self.seen: list[Tensor] = []

    def loss(self, step: int) -> Tensor:
        x = torch.randn(512, 8, generator=torch.Generator().manual_seed(step)).to(self.device)
        loss: Tensor = self.net(x).pow(2).mean()
        self.seen.append(loss.detach())
        return loss

    def clip(self) -> None:
        self.seen.append(nn.utils.clip_grad_norm_(self.net.parameters(), 0.05))

    def step(self, step: int) -> None:
        self.loss(step).backward()  # type: ignore[no-untyped-call]
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self) -> bytes:
        """The optimizer's state dict, as a checkpoint has it."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        self.optimizer.load_state_dict(torch.load(io.BytesIO(saved), map_location=self.device))


def scheduled(loop: Loop) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0 / (step + 1))
    for step in range(STEPS):
        loop.step(step)
        schedule.step()


def accumulating(loop: Loop) -> None:
    for step in range(STEPS):
        for micro in range(3):
            (loop.loss(3 * step + micro) / 3).backward()  # type: ignore[no-untyped-call]
        loop.clip()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)


def with_a_late_group_and_hooks(loop: Loop) -> None:
    """The hook changes a gradient, as torch lets it."""

    def hook(*_: Any) -> None:
        loop.own[0].grad.mul_(2.0)

    loop.optimizer.register_step_pre_hook(hook)
    for step in range(STEPS):
        if step == 3:
            loop.late.requires_grad_(True)
            loop.optimizer.add_param_group({"params": [loop.late], "lr": 0.2})
        loop.step(step)


def with_closures(loop: Loop) -> None:
    def closure(step: int) -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for step in range(STEPS):
        loop.seen.append(loop.optimizer.step(lambda step=step: closure(step)).detach())


def with_torchs_scaler(loop: Loop) -> None:
    scaler = torch.amp.GradScaler(loop.device.type, init_scale=1024.0, growth_interval=3)
    for step in range(STEPS):
        loss = loop.loss(step) * (float("inf") if step == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        loop.clip()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    assert scaler.get_scale() == 1024.0 * 2, "grown, halved, grown"


PLAYS: tuple[Callable[[Loop], None], ...] = (
    *(scheduled, accumulating, with_a_late_group_and_hooks, with_closures, with_torchs_scaler),
)


def entries(state_dict: dict[str, Any]) -> list[tuple[int, str, Any]]:
    state = state_dict["state"]
    return [(n, key, state[n][key]) for n in sorted(state) for key in sorted(state[n])]


def assert_same(mine: Loop, stock: Loop) -> None:
    """Losses, norms, parameters, and the state dicts, bit for bit."""
    pairs = [
        *zip(mine.seen, stock.seen, strict=True),
        *zip(mine.net.parameters(), stock.net.parameters(), strict=True),
    ]
    for a, b in pairs:
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0.0, atol=0.0, equal_nan=True)
    saved, expected = mine.optimizer.state_dict(), stock.optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    for (n, key, a), (m, other, b) in zip(entries(saved), entries(expected), strict=True):
        assert (n, key) == (m, other)
        assert torch.equal(a.cpu(), b.cpu()) if isinstance(b, Tensor) else a == b


def assert_play_as_stock(
    play: Callable[[Loop], None], cls: Any, device: str, **kwargs: Any
) -> None:
    stock = Loop(cls, device, offload=False, **kwargs)
    play(stock)
    for watched in (False, True):
        mine = Loop(cls, device, offload=True, watched=watched, **kwargs)
        assert isinstance(mine.optimizer, cls)
        play(mine)
        assert_same(mine, stock)


def assert_checkpoints_interchange(device: str, cls: Any, **kwargs: Any) -> None:
    """A run that was begun with one is ended with the other."""
    whole = Loop(cls, device, offload=False, **kwargs)
    for step in range(STEPS):
        whole.step(step)
    for begins, ends in ((True, False), (False, True), (True, True)):
        first = Loop(cls, device, offload=begins, **kwargs)
        for step in range(4):
            first.step(step)
        second = Loop(cls, device, offload=ends, **kwargs)
        second.seen = first.seen
        second.net.load_state_dict(first.net.state_dict())
        second.load(first.saved())
        for step in range(4, STEPS):
            second.step(step)
        assert_same(second, whole)
