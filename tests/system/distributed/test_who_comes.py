"""No collective is entered to which a rank does not come: see Note [Who comes to a collective].

Each test has a rank that does not come, and is ended after 30 s. The reference is torch's own loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from children import RANKS, on_two_ranks
from support import reset
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from two_ranks import prepared_shards, weights
from versions import before_torch

from accel_scaler import ConfigError, OrderError, UnsupportedError, attach, detach

LIMIT_S = 30
SCALE = 256.0
EXPLAINS: list[dict[str, Any]] = [
    {},
    {"find_overflow": "replay"},
    {"find_overflow": "always", "heal": True},
    {"on_overflow": "retry", "growth_interval": 3},
]
"""Settings with which ranks that overflow together tell each other of it."""
ONLY_FP16 = ("heal", "on_overflow", "growth_interval")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def head() -> nn.Module:
    torch.manual_seed(4 + dist.get_rank())
    return nn.Linear(1, 1)


def batch(number: int) -> Tensor:
    seeded = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 4, generator=seeded)


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class Stock:
    """torch's scaler where the loss is scaled; else a step is left out where a gradient is not
    finite."""

    def __init__(self, precision: str, settings: dict[str, Any]) -> None:
        growth, is_scaled = settings.get("growth_interval", 2000), precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", SCALE, 2.0, 0.5, growth, enabled=is_scaled)
        self.half = torch.autocast("cpu", torch.float16, enabled=is_scaled)
        self.model: Any = DistributedDataParallel(net())
        self.optimizer = sgd(self.model)

    def add(self, module: nn.Module) -> tuple[Any, Any]:
        """A module of this rank's own, and its optimizer."""
        return module, sgd(module)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            is_fine = all(bool(p.grad.isfinite().all()) for p in params if p.grad is not None)
            if self.scaler.is_enabled() or is_fine:
                self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


class Ours:
    def __init__(self, precision: str, settings: dict[str, Any]) -> None:
        reset()
        if precision == "fp16":
            settings = {"init_scale": SCALE} | settings
        else:
            settings = {k: v for k, v in settings.items() if k not in ONLY_FP16}
        self.accelerator: Any = attach(Accelerator(mixed_precision=precision), **settings)
        module = net()
        self.model, self.optimizer = self.accelerator.prepare(module, sgd(module))
        self.half = torch.autocast("cpu", enabled=False)
        self.backward = self.accelerator.backward

    def add(self, module: nn.Module) -> tuple[Any, Any]:
        return module, self.accelerator.prepare(sgd(module))

    def step(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def finish(self) -> list[bool]:
        """Which windows were skipped."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.abandon_window()
        records = self.accelerator.scaler_history.records
        detach(self.accelerator)
        return [record.skipped for record in records]


def loss_of(loop: Stock | Ours, number: int, then: Callable[[Tensor], Tensor] | None = None) -> Any:
    with loop.half:
        out = loop.model(batch(number))
    out = out.float() if then is None else then(out.float())
    return out.square().mean()


def compared(
    train: Callable[[Any], None], precision: str, settings: dict[str, Any], folder: Path
) -> None:
    """``train`` gives the same parameters in both loops, and ends on both ranks."""

    def body() -> None:
        stock, ours = Stock(precision, settings), Ours(precision, settings)
        modules = [train(stock), train(ours)]
        one, other = ([p.detach() for m in some for p in m.parameters()] for some in modules)
        assert all(map(torch.equal, one, other))
        ours.finish()

    on_two_ranks(body, folder, LIMIT_S)


def passes_by(loop: Stock | Ours, x: Tensor) -> Iterator[Tensor]:
    yield loop.model(x)
    yield loop.model.module(x + 1)


def two_forwards(loop: Stock | Ours, x: Tensor) -> Iterator[Tensor]:
    outputs = [loop.model(x), loop.model(x + 1)]
    yield from outputs


def no_sync_before(loop: Stock | Ours, x: Tensor) -> Iterator[Tensor]:
    with loop.model.no_sync():
        late = loop.model(x)
    yield loop.model(x + 1)
    yield late


@pytest.mark.parametrize("settings", EXPLAINS)
@pytest.mark.parametrize("outputs", [passes_by, two_forwards, no_sync_before])
def test_a_last_backward_that_ddp_does_not_reduce(
    outputs: Callable[[Any, Tensor], Iterator[Tensor]], settings: dict[str, Any], tmp_path: Path
) -> None:
    """An overflow in it, on rank 1, is that rank's alone."""

    def train(loop: Stock | Ours) -> Any:
        for number in range(4):
            made = outputs(loop, batch(number))
            with loop.half:
                losses = [next(made)]
                losses += made if outputs is two_forwards else ()
            for index in range(2):
                if index == len(losses):
                    with loop.half:
                        losses.append(next(made))
                bad = index == 1 and number == 2 and dist.get_rank() == 1
                loop.backward(losses[index].float().square().mean() * (torch.inf if bad else 1.0))
            loop.step(loop.optimizer)
        return [loop.model]

    compared(train, "fp16", settings | {"growth_interval": 2000}, tmp_path)


@pytest.mark.parametrize("settings", EXPLAINS)
def test_a_backward_that_only_one_rank_makes(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of a model of its own, between DDP's forward and its step: all overflow together."""

    def train(loop: Stock | Ours) -> Any:
        probe = nn.Linear(4, 1)
        for number in range(4):
            loss = loss_of(loop, number) * (torch.inf if number == 2 else 1.0)
            if dist.get_rank() == 0:
                loop.backward(probe(batch(number)).square().mean())
            loop.backward(loss)
            loop.step(loop.optimizer)
        return [loop.model]

    compared(train, "fp16", settings | {"growth_interval": 2000}, tmp_path)


@pytest.mark.parametrize("settings", EXPLAINS)
def test_another_models_step_between_two_backwards(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """DDP reduces the first of them alone; what overflows in the second is rank 1's."""

    def train(loop: Stock | Ours) -> Any:
        own, optimizer = loop.add(head())
        for number in range(4):
            with loop.half:
                out = loop.model(batch(number)).float()
            loss = out.square().mean()
            if isinstance(loop, Ours):
                loop.accelerator.backward(loss, retain_graph=True)
            else:
                loop.scaler.scale(loss).backward(retain_graph=True)
            loop.backward(own(batch(number)[:, :1]).square().mean())
            loop.step(optimizer)
            bad = number == 2 and dist.get_rank() == 1
            loop.backward((out - 1).square().mean() * (torch.inf if bad else 1.0))
            loop.step(loop.optimizer)
        return [loop.model, own]

    compared(train, "no", settings, tmp_path)


@pytest.mark.parametrize("settings", EXPLAINS)
def test_a_hook_of_ddp_that_averages_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    def train(loop: Stock | Ours) -> Any:
        loop.model.register_comm_hook(None, noop_hook)
        for number in range(4):
            bad = number == 2 and dist.get_rank() == 1
            loop.backward(loss_of(loop, number) * (torch.inf if bad else 1.0))
            loop.step(loop.optimizer)
        return [loop.model]

    compared(train, "no", settings, tmp_path)


class Talks(nn.Module):
    """Its forward communicates, as a contrastive loss over all ranks does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        every = [torch.empty_like(out) for _ in range(RANKS)]
        dist.all_gather(every, out.detach())
        return out + torch.stack(every).mean()


@pytest.mark.parametrize("settings", EXPLAINS)
def test_a_forward_that_communicates_is_not_run_again_alone(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """A parameter of rank 1 overflows."""

    def body() -> None:
        reset()
        accelerator: Any = Accelerator(mixed_precision="fp16")
        attach(accelerator, init_scale=SCALE, **settings)
        module, own = Talks(), head()
        model, optimizer, its = accelerator.prepare(module, sgd(module), sgd(own))
        for number in range(4):
            x = batch(number)
            bad = torch.inf if number == 1 and dist.get_rank() == 1 else 1.0
            accelerator.backward(model(x).float().square().mean() + own(x[:, :1]).sum() * bad)
            its.step()
            optimizer.step()
            assert its.step_was_skipped is (bad != 1.0)
            assert not optimizer.step_was_skipped
            its.zero_grad()
            optimizer.zero_grad()
        accelerator.scaler.abandon_window()
        detach(accelerator)

    on_two_ranks(body, tmp_path, LIMIT_S)


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_shards_clipped_together_with_a_ranks_own(precision: str, tmp_path: Path) -> None:
    """Rank 1's own gradients overflow: all ranks skip all of it, once."""

    def body() -> None:
        reset()
        accelerator: Any = Accelerator(mixed_precision=precision)
        attach(accelerator, **({"init_scale": SCALE} if precision == "fp16" else {}))
        model, own = prepared_shards(accelerator, plain := net(), *plain), head()
        optimizers = [accelerator.prepare_optimizer(sgd(each)) for each in (plain, own)]
        params, seen = [*plain.parameters(), *own.parameters()], []
        for number in range(3):
            x = batch(number)
            bad = torch.inf if number == 1 and dist.get_rank() == 1 else 1.0
            accelerator.backward(model(x).float().square().mean() + own(x[:, :1]).sum() * bad)
            before = weights(plain.parameters())
            accelerator.clip_grad_norm_(params, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                seen.append(optimizer.step_was_skipped)
            assert torch.equal(before, weights(plain.parameters())) is (number == 1)
            accelerator.gradient_state._set_sync_gradients(True)
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert seen == [False, False, True, True, False, False]
        detach(accelerator)

    on_two_ranks(body, tmp_path, LIMIT_S)


@pytest.mark.parametrize("name", ["skip_nonfinite", "init_scale"])
def test_settings_by_which_ranks_would_step_otherwise_are_refused_on_all(
    name: str, tmp_path: Path
) -> None:
    values: Any = {"skip_nonfinite": [True, False], "init_scale": [64.0, 32.0]}[name]

    def body() -> None:
        reset()
        precision = "fp16" if name == "init_scale" else "no"
        accelerator: Any = Accelerator(mixed_precision=precision)
        attach(accelerator, **{name: values[dist.get_rank()]})
        module = net()
        with pytest.raises(ConfigError, match=name):
            accelerator.prepare(module, sgd(module))
        detach(accelerator)

    on_two_ranks(body, tmp_path, LIMIT_S)


def test_a_mesh_that_leaves_out_a_rank(tmp_path: Path) -> None:
    """DTensors of one rank: it alone steps them, while the other one does nothing."""

    def body() -> None:
        meshes = [DeviceMesh("cpu", [rank]) for rank in range(RANKS)]
        for settings in EXPLAINS:
            reset()
            if dist.get_rank() == 1:
                continue
            accelerator: Any = attach(
                Accelerator(mixed_precision="fp16"), init_scale=4.0, **settings
            )
            module = nn.Linear(4, 1, bias=False)
            whole = module.weight.detach().clone()
            module.weight = nn.Parameter(distribute_tensor(whole, meshes[0], [Shard(0)]))
            model = accelerator.prepare_model(module, evaluation_mode=True)
            optimizer = accelerator.prepare_optimizer(torch.optim.SGD(module.parameters(), lr=0.5))
            for factor in (1.0, torch.inf, 1.0):
                accelerator.backward((model.weight * factor).sum().to_local())
                optimizer.step()
                optimizer.zero_grad()
            assert [r.skipped for r in accelerator.scaler_history.records] == [False, True, False]
            assert torch.equal(weights(module.parameters()), (whole - 0.5 - 0.5).flatten())
            detach(accelerator)

    on_two_ranks(body, tmp_path, LIMIT_S)


def test_ranks_that_agree_at_each_step_may_not_run_out_of_inputs(tmp_path: Path) -> None:
    def body() -> None:
        loop = Ours("fp16", {"sharded": True})
        before = [p.detach().clone() for p in loop.model.parameters()]
        with Join([loop.model]):
            loop.backward(loss_of(loop, 0))
            with pytest.raises(UnsupportedError, match="even_batches"):
                loop.step(loop.optimizer)
        assert all(map(torch.equal, before, loop.model.parameters()))
        loop.finish()

    on_two_ranks(body, tmp_path, LIMIT_S)


def test_gradients_that_are_zero_on_one_rank_alone_are_not_dropped(tmp_path: Path) -> None:
    """A backward after a look at the norm is refused by both ranks; none of them waits in a check
    that the other one does not come to."""

    def body() -> None:
        accelerator: Any = attach(Accelerator(mixed_precision="fp16"), sharded=True)
        part = nn.Parameter(torch.ones(4))
        optimizer: Any = accelerator.prepare(torch.optim.SGD([part], lr=0.5))
        accelerator.backward((part * dist.get_rank()).sum())
        accelerator.unscale_gradients()
        accelerator.backward(part.sum())
        with pytest.raises(OrderError, match="unscaled or clipped before the last micro-batch"):
            optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(part.sum())
        optimizer.step()
        assert torch.equal(part.detach(), torch.full((4,), 0.5))
        detach(accelerator)

    on_two_ranks(body, tmp_path, LIMIT_S)
