"""The two sides of a random history of two ranks: an attached accelerator, and torch's own loop
with the rules written out. Each rank plays both; ``rank_histories.py`` says what the nouns mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration
from children import RANKS, everywhere
from histories import Short
from support import reset
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from two_ranks import prepared_shards, schedule_of, shard_of, whole

from accel_scaler import attach, detach

EVERY = 2
"""Steps between two averages of LocalSGD; windows between two growths of the scale."""
LOUD, CLIP = 64.0, 0.5
LIMIT, TIMES, NORMS, FIRST = 8.0, 4.0, 4, 2
"""Norms above ``LIMIT``, or ``TIMES`` the median of the last ``NORMS``, are spikes. Before there
are ``FIRST`` of them there is no median; the package has more of both."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.bfloat16}
FACTORS = {"inf": math.inf, "nan": math.nan, "loud": LOUD}


@dataclass(frozen=True, repr=False)
class Setup(Short):
    """The choices before the first window.

    Attributes:
        wrap: the model is under ``ddp``, sharded by ``fsdp2``, or, with ``tensor``, has DTensors
            beside a plain parameter, as ``parallelize_module`` leaves them.
        alone: each rank has a parameter of its own: in an optimizer ``apart`` from the model's, or
            ``within`` that; ``ignored``: within, a part of the model that DDP ignores.
        sharded: with ``alone``: ranks agree on each skip.
        group: windows in torch's ``join``, or in Accelerate's LocalSGD (``local``).
        missing: in ``join`` each rank runs out of inputs so many windows earlier.
        after: so many windows come after the group.
        low: parameters of 16 bits, with float32 masters.
        micro: micro-batches in a window.
        clip: ``all`` at once, the ``model``'s parameters, ``each`` optimizer's, each ``value``.
        early: it clips after each micro-batch.
        limit: ``skip_norm_above``.
        unlike: rank 1 has no setting of ``retry``, ``heal`` and ``find``.
        telemetry: the ranks that write a file.
    """

    wrap: str = "ddp"
    alone: str = ""
    sharded: bool = False
    group: str = ""
    missing: tuple[int, int] = (0, 0)
    after: int = 0
    precision: str = "fp16"
    low: bool = False
    micro: int = 1
    scale: float = 1024.0
    mode: str = "sync"
    clip: str = ""
    early: bool = False
    limit: float | str | None = None
    retry: bool = False
    heal: bool = False
    find: str = "auto"
    unlike: bool = False
    telemetry: tuple[int, ...] = ()

    @property
    def scaled(self) -> bool:
        return self.precision == "fp16"

    @property
    def has_shards(self) -> bool:
        return self.wrap != "ddp"


@dataclass(frozen=True, repr=False)
class Window(Short):
    """Micro-batches, a clip, a step of each optimizer.

    Attributes:
        bad: a factor of the loss (``inf``, ``nan``, ``loud``); inf in the gradient of the rank's
            own parameter, by a hook (``alone``) or by the loss (``alone loss``); inf in an element
            of the first shard of a gradient, written before the step (``shard``).
        on: the ranks where it is bad, or raises.
        at: the micro-batch.
        no_sync: DDP synchronises nothing in it.
        raises: in the ``forward``, in one that runs ``again``, or before the ``step``.
    """

    bad: str = ""
    on: tuple[int, ...] = (0, 1)
    at: int = 0
    no_sync: bool = False
    raises: str = ""


class Raised(Exception):  # noqa: N818
    """A rank raises this in the middle."""


class Net(nn.Module):
    """A plain parameter, and layers whose rows two ranks cannot share out evenly. ``allowed``: so
    many forwards, then one raises."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed, seeded = math.inf, torch.Generator().manual_seed(5)
        self.gain = nn.Parameter(torch.rand(6, generator=seeded) + 0.5)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        for p in (*self.first.parameters(), *self.second.parameters()):
            p.data = torch.randn(p.shape, generator=seeded) / 2

    def forward(self, x: Tensor) -> Tensor:
        self.allowed -= 1
        if self.allowed < 0:
            raise Raised(f"rank {dist.get_rank()}")
        out: Tensor = self.second(torch.tanh(self.first(x * self.gain)))
        return out


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


class Side:
    """The model, what a rank does with it, and what is seen: for each window losses, which
    optimizers skipped, the next scale and learning rates."""

    wrapped: Any
    """The model as the loop calls it."""
    optimizers: Sequence[Any]

    def __init__(self, setup: Setup) -> None:
        self.setup, self.rank, self.net = setup, dist.get_rank(), Net()
        self.seen: list[Any] = []
        if setup.low:
            self.net.to(DTYPES[setup.precision])
        self.own = nn.Parameter(torch.full((2 + self.rank,), 0.5)) if setup.alone else None
        if setup.alone == "ignored":
            self.net.head = nn.ParameterList([self.own])
            ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(self.net, ["head.0"])
        if setup.wrap == "tensor":
            plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(self.net, init_device_mesh("cpu", (RANKS,)), plan)

    def split(self) -> list[list[nn.Parameter]]:
        """The parameters of each optimizer, once the model is wrapped."""
        model = [p for p in self.net.parameters() if p is not self.own]
        own = [] if self.own is None else [self.own]
        return [model, own] if self.setup.alone == "apart" else [model + own]

    def clipped(self) -> list[list[nn.Parameter]]:
        """The parameters of each clip."""
        every = [p for part in self.split() for p in part]
        model = [p for p in every if p is not self.own]
        return {"": [], "model": [model], "each": self.split()}.get(self.setup.clip, [every])

    def loss(self, number: int, window: Window, index: int) -> Tensor:
        """This rank's, of one micro-batch."""
        is_here, bad = self.rank in window.on, window.bad
        is_bad = is_here and window.at == index
        stream = 0 if self.setup.wrap == "tensor" else self.rank
        seeded = torch.Generator().manual_seed(1000 * number + 10 * index + stream)
        x, y = torch.randn(4, 6, generator=seeded), torch.randn(4, 1, generator=seeded)
        self.net.allowed = {"forward": 0, "again": 1}.get(window.raises * is_here, math.inf)
        loss = (self.forward(x.to(self.net.gain.dtype)) - y).square().mean()
        if is_bad and bad in FACTORS:
            loss = loss * FACTORS[bad]
        if self.own is not None:
            own = self.own * (math.inf if is_bad and bad == "alone loss" else 1.0)
            if is_bad and bad == "alone":
                own.register_hook(lambda grad: grad * math.inf)
            loss = loss + own.sum()
        return loss

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wrapped(x)
        return out

    def before_step(self, window: Window) -> None:
        if self.rank in window.on and window.raises == "step":
            raise Raised(f"rank {self.rank}")
        if self.rank in window.on and window.bad == "shard":
            shards = (shard_of(p.grad) for p in self.net.parameters() if are_shards([p]))
            next(shard for shard in shards if shard.numel()).view(-1)[0] = math.inf

    def play(self, windows: Sequence[Window], end: int) -> None:
        """This rank's windows before ``end``."""
        many = len(windows) - self.setup.after
        with self.group():
            for number in range(min(end, many - self.setup.missing[self.rank])):
                self.train(number, windows[number])
        for number in range(many, end):
            self.train(number, windows[number])

    def group(self) -> Any:
        raise NotImplementedError

    def train(self, number: int, window: Window) -> None:
        raise NotImplementedError

    def note(self, losses: list[float], skipped: list[bool], scale: float) -> None:
        rates = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.seen.append([torch.tensor(losses), skipped, scale, rates])

    def parameters(self) -> list[Tensor]:
        return [shard_of(p).clone() for part in self.split() for p in part]


class Ours(Side):
    """An attached accelerator."""

    def __init__(self, setup: Setup, folder: str) -> None:
        super().__init__(setup)
        reset()
        accelerator: Any = Accelerator(
            mixed_precision=setup.precision,
            gradient_accumulation_steps=setup.micro,
            # Else the schedule is stepped once for each rank.
            dataloader_config=DataLoaderConfiguration(split_batches=True),
        )
        given: dict[str, Any] = {"step_mode": setup.mode}
        given |= {"skip_norm_above": setup.limit, "master_weights": "fp32"}
        given |= {"sharded": setup.sharded}
        if self.rank in setup.telemetry:
            given |= {"telemetry": f"{folder}/run_{{rank}}.jsonl"}
        if setup.scaled:
            given |= {"init_scale": setup.scale, "growth_interval": EVERY}
        if not (setup.unlike and self.rank == 1):
            given |= {"find_overflow": setup.find, "heal": setup.heal}
            given |= {"on_overflow": "retry"} if setup.retry else {}
        self.accelerator, self.local = attach(accelerator, **given), None
        if setup.wrap == "fsdp2":
            parts = self.net.first, self.net.second
            self.wrapped = prepared_shards(accelerator, self.net, *parts)
        elif setup.wrap == "tensor":
            accelerator._models.append(self.net)
            self.wrapped = accelerator.prepare_model(self.net, evaluation_mode=True)
        else:
            self.wrapped = accelerator.prepare(self.net)
        inner = [sgd(part) for part in self.split()]
        self.optimizers = [accelerator.prepare_optimizer(each) for each in inner]
        self.schedules = [accelerator.prepare_scheduler(schedule_of(each)) for each in inner]

    @contextmanager
    def group(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.setup.group == "join":
                with mock.patch.object(Accelerator, "multi_device", True):  # it joins GPUs alone
                    joined = self.accelerator.join_uneven_inputs([self.wrapped], even_batches=False)
                    stack.enter_context(joined)
            elif self.setup.group == "local":
                self.local = LocalSGD(self.accelerator, self.wrapped, EVERY)
                stack.enter_context(self.local)
            yield
        self.local = None

    def train(self, number: int, window: Window) -> None:
        accelerator, losses = self.accelerator, []
        with accelerator.no_sync(self.wrapped) if window.no_sync else nullcontext():
            for index in range(self.setup.micro):
                with accelerator.accumulate(self.wrapped):
                    loss = self.loss(number, window, index)
                    accelerator.backward(loss)
                    losses.append(float(loss.detach()))
                    if accelerator.sync_gradients:
                        self.before_step(window)
                    for part in self.clipped():
                        if self.setup.early or accelerator.sync_gradients:
                            is_value = self.setup.clip == "value"
                            clip = "clip_grad_value_" if is_value else "clip_grad_norm_"
                            getattr(accelerator, clip)(part, CLIP)
                    for each in (*self.optimizers, *self.schedules):
                        each.step()
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
        scaler, skipped = accelerator.scaler, [o.step_was_skipped for o in self.optimizers]
        self.note(losses, skipped, 1.0 if scaler is None else scaler.get_scale())
        if self.local is not None:
            self.local.step()

    def close(self) -> list[str]:
        """Returns its events."""
        for optimizer in self.optimizers:
            optimizer.synchronize()
        records = list(self.accelerator.scaler_history.records)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.abandon_window()
        detach(self.accelerator)
        events = {"skipped": "skipped", "retries": "retried", "spike": "spike"}
        return [event for name, event in events.items() if any(getattr(r, name) for r in records)]


class Plain(Side):
    """torch's own loop, with float32 masters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.wrapped = self.net
        if setup.wrap == "fsdp2":
            reset()
            self.wrapped = prepared_shards(Accelerator(), self.net, self.net.first, self.net.second)
        elif setup.wrap == "ddp":
            self.wrapped = DistributedDataParallel(self.net)
        self.masters: dict[Any, Any] = {
            p: nn.Parameter(p.detach().float() if setup.low else p.detach().clone())
            for part in self.split()
            for p in part
        }
        self.optimizers = [sgd([self.masters[p] for p in part]) for part in self.split()]
        self.schedules = [schedule_of(optimizer) for optimizer in self.optimizers]
        self.scale, self.good, self.steps_alone, self.is_local = setup.scale, 0, 0, False
        self.norms: list[list[float]] = [[] for _ in self.optimizers]

    @contextmanager
    def group(self) -> Iterator[None]:
        self.is_local = self.setup.group == "local"
        joined = Join([self.wrapped]) if self.setup.group == "join" else nullcontext()
        with joined, self.wrapped.no_sync() if self.is_local else nullcontext():
            yield
        if self.is_local:
            self.average()
        if self.setup.group == "join" and self.setup.scaled:  # of the rank that has trained most
            states = everywhere((len(self.seen), self.scale, self.good))
            _, self.scale, self.good = max(states, key=lambda state: int(state[0]))
        self.is_local = False

    def average(self) -> None:
        for p in self.net.parameters():
            dist.all_reduce(p.data)
            p.data /= RANKS

    def forward(self, x: Tensor) -> Tensor:
        precision = self.setup.precision
        with torch.autocast("cpu", DTYPES[precision], enabled=precision != "no"):
            out: Tensor = self.wrapped(x)
        return out.float()

    def train(self, number: int, window: Window) -> None:
        losses, first = self.backward(number, window), self.scale
        self.before_step(window)
        bad = self.are_bad()
        while any(bad) and self.may_retry(window) and self.scale > 1.0:
            self.scale, self.good = self.scale / 2, 0
            self.backward(number, window)
            bad = self.are_bad()
        for p, master in self.masters.items():
            master.grad, p.grad = p.grad.to(master.dtype) * (1.0 / self.scale), None
        norms = [self.norm(optimizer) for optimizer in self.optimizers]
        self.clip(bad)
        spikes = [not bad[i] and self.is_spike(i, norm) for i, norm in enumerate(norms)]
        skipped = [a or b for a, b in zip(bad, spikes, strict=True)]
        for i, is_skipped in enumerate(skipped):
            if not is_skipped:
                self.follow(self.split()[i])
                self.optimizers[i].step()
                self.schedules[i].step()
                for p in self.split()[i]:
                    p.data.copy_(self.masters[p].data)
        if any(bad):
            self.scale, self.good = first / 2, 0
        elif not any(spikes):
            self.good = (self.good + 1) % EVERY
            self.scale *= 1.0 if self.good else 2.0
        self.scale = self.scale if self.setup.scaled else 1.0
        self.note(losses, skipped, self.scale)
        self.steps_alone += self.is_local
        if self.is_local and self.steps_alone % EVERY == 0:
            self.average()

    @torch.no_grad()
    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Masters take what was written to their parameters since they stepped: an average."""
        for p in parameters if not self.setup.has_shards else ():
            master = self.masters[p]
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))

    def backward(self, number: int, window: Window) -> list[float]:
        """All micro-batches, from no gradients. Returns their losses."""
        setup, losses = self.setup, []
        for p in self.masters:
            p.grad = None
        for index in range(setup.micro):
            is_last = index == setup.micro - 1
            waits = not setup.has_shards and (window.no_sync or not is_last)
            with self.wrapped.no_sync() if waits else nullcontext():
                loss = self.loss(number, window, index)
                (loss / setup.micro * self.scale).backward()
            losses.append(float(loss.detach()))
            for part in self.clipped() if setup.early and not (is_last or setup.scaled) else ():
                if setup.clip == "value":
                    self.clamp({p: p.grad for p in part})
                else:
                    nn.utils.clip_grad_norm_(part, CLIP)
        return losses

    def are_bad(self) -> list[bool]:
        """For each optimizer whether a gradient is inf or NaN: on this rank, and where ranks have
        parts, on any."""
        found = []
        for part in self.split():
            bad = torch.tensor([not bool(shard_of(p.grad).isfinite().all()) for p in part]).any()
            is_common = self.setup.sharded or are_shards(part)
            found.append(any(everywhere(bool(bad))) if is_common else bool(bad))
        return found

    def may_retry(self, window: Window) -> bool:
        """It overflowed by its scale, and on all ranks, who know it of each other."""
        setup, is_by_scale = self.setup, window.bad in ("", "loud") and self.own is None
        is_together = not (window.no_sync or self.is_local or setup.unlike)
        return setup.retry and is_by_scale and is_together

    def norm(self, optimizer: Any) -> float:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norm = float(norm_of(grads))
        return (
            math.hypot(*everywhere(norm)) if self.setup.sharded and not are_shards(grads) else norm
        )

    def clip(self, bad: list[bool]) -> None:
        """All optimizers of a clip that overflows are skipped."""
        for part in self.clipped():
            owners = [i for i, own in enumerate(self.split()) if not set(own).isdisjoint(part)]
            grads: list[Any] = [self.masters[p].grad for p in part]
            if self.setup.clip == "value":
                self.clamp({p: self.masters[p].grad for p in part})
            elif any(bad[i] for i in owners):
                for i in owners:
                    bad[i] = True
            else:
                factor = (CLIP / (norm_of(grads) + 1e-6)).clamp(max=1.0)
                for grad in map(shard_of, grads):
                    grad.mul_(factor)

    def clamp(self, grads: dict[Any, Any]) -> None:
        """An optimizer whose gradients are not finite is to be skipped; they stay as they are."""
        for own in self.split():
            some = [shard_of(grads[p]) for p in own]
            for grad in some if all(bool(each.isfinite().all()) for each in some) else ():
                grad.clamp_(-CLIP, CLIP)

    def is_spike(self, number: int, norm: float) -> bool:
        limit, last = self.setup.limit, self.norms[number]
        if isinstance(limit, str):
            limit = TIMES * statistics.median(last[-NORMS:]) if len(last) >= FIRST else None
            last += [norm] if norm and math.isfinite(norm) else []
        return limit is not None and norm > limit


def are_shards(tensors: Sequence[Any]) -> bool:
    return any(hasattr(t, "placements") for t in tensors)


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of DTensors and plain tensors together."""
    kinds: dict[type, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(type(grad), []).append(grad)
    norms = [whole(nn.utils.get_total_norm(each)) for each in kinds.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
