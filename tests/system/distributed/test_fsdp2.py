"""The asynchronous optimizer under torch's FSDP2 on two gloo ranks: torch's numbers, bit for bit.

Every group of parameters is gathered before it is used, some ahead of time, while the optimizer
thread, which updates a part when somebody waits for it, has the shards: the wait has to come
before the gather.
"""

from __future__ import annotations

import copy
import inspect
import io
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from async_support import lazy
from children import on_two_ranks
from support import reset, same, stock_fp16_on_cpu
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.optimization import Adafactor
from two_ranks import (
    CLIP,
    DELAYED,
    EVERY,
    OFFLOAD,
    OVERFLOW,
    OVERLAP,
    PREVIEW,
    SCALER,
    SHOWN,
    SKIPPED,
    WINDOWS,
    batch,
    compare,
    differing,
    net,
    optimizer_of,
    reference,
    state_of,
    weights,
    whole,
)
from versions import before_torch

from accel_scaler import AsyncOptimizer, GradScaler, UnsupportedError, attach
from accel_scaler.async_optimizer.pending_parameter import ParameterHold, can_hold_parameters
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")

EVERY_OF_SHARDS = EVERY | {
    "overlap backwards": OVERLAP | {"order": lambda params: params[::-1]},
    "overlap reduced": OVERLAP | {"hold_back": False},
}


def shard(model: Any, *, prefetch: int = 0, root: bool = True, **kwargs: Any) -> Any:
    """Each block and the head a group, the rest the root's; ``prefetch`` so many blocks ahead.

    What the root gathers is updated first, or its wait would be one for all.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.blocks, model.head):
        fully_shard(block, mesh=mesh, **kwargs)
    if root:
        fully_shard(model, mesh=mesh, **kwargs)
    blocks = list(model.blocks)
    for place, block in enumerate(blocks[:-1] if prefetch else ()):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + prefetch])
    if prefetch and root:
        model.set_modules_to_forward_prefetch(blocks[:prefetch])
    return model


def shard_together(model: Any) -> Any:
    """The first and the last block are one group: both are gathered where the first is used."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard([model.blocks[0], model.blocks[2]], mesh=mesh)
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {
    "resharded": partial(shard, reshard_after_forward=True),
    "kept": partial(shard, reshard_after_forward=False),
    "prefetched": partial(shard, reshard_after_forward=True, prefetch=1),
    "prefetched far, kept": partial(shard, reshard_after_forward=False, prefetch=2),
    "together": shard_together,
    "bf16": partial(shard, mp_policy=BF16),
}
RUNS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("sgd", "resharded"): EVERY_OF_SHARDS | SHOWN,
    ("sgd", "prefetched"): {"overlap": OVERLAP, "delayed": DELAYED, "preview": PREVIEW},
    **{
        ("sgd", layout): {"overlap": OVERLAP, "preview": PREVIEW}
        for layout in ("kept", "together", "prefetched far, kept")
    },
    ("sgd", "bf16"): {"overlap": OVERLAP},
    ("adamw", "bf16"): {"preview": PREVIEW},  # sgd's is the update itself, as bfloat16 has it
    ("adamw", "resharded"): {"delayed offload": DELAYED | OFFLOAD, **SHOWN},
    ("adamw", "prefetched"): {"preview": PREVIEW},
    ("fused", "resharded"): {"overlap": OVERLAP},
}


@pytest.mark.parametrize(("kind", "layout"), RUNS)
def test_every_mode_equals_torch_on_the_same_ranks(kind: str, layout: str, tmp_path: Path) -> None:
    """Losses, norms, scales, rates, parameters, optimizer state, and an overflow in one shard."""
    on_two_ranks(lambda: compare(RUNS[kind, layout], LAYOUTS[layout], kind), tmp_path)


def test_parameters_that_are_not_sharded_are_stepped_beside_those_that_are(tmp_path: Path) -> None:
    """Unscaled: torch cannot unscale or clip sharded and plain gradients together."""
    runs = {"overlap": OVERLAP, "delayed": DELAYED, "preview": PREVIEW}
    wrap = partial(shard, root=False)
    on_two_ranks(lambda: compare(runs, wrap, "sgd", scaled=False), tmp_path)


def test_our_scaler_in_torchs_own_loop_is_torchs(tmp_path: Path) -> None:
    """``unscale_``, clip, ``step``, ``update``: an inf in one shard is found on both ranks."""

    def body() -> None:
        brain = lambda model: shard(model.bfloat16())  # noqa: E731
        for kind, wrap in (("sgd", shard), ("adamw", shard), ("sgd", brain)):
            mine, theirs = (
                reference(wrap, kind, kind_of_scaler=scaler)
                for scaler in (GradScaler, torch.amp.GradScaler)
            )
            assert differing(mine, theirs) == []
            assert mine["skipped"] == SKIPPED

    on_two_ranks(body, tmp_path)


class Training:
    """One boundary at a time, torch's without ``settings`` or ours."""

    def __init__(self, kind: str, settings: dict[str, Any] | None) -> None:
        self.model, self.is_ours = shard(net()), settings is not None
        self.optimizer: Any = optimizer_of(kind, self.model.parameters())
        self.inner = self.optimizer
        self.scaler = (GradScaler if self.is_ours else torch.amp.GradScaler)("cpu", **SCALER)
        if settings is not None:
            self.optimizer = AsyncOptimizer(
                self.optimizer, self.model, scaler=self.scaler, **settings
            )

    def step(self, window: int) -> None:
        x, y = batch(window, 0)
        self.scaler.scale(nn.functional.mse_loss(self.model(x), y)).backward()
        if self.is_ours:
            self.optimizer.clip_grad_norm_(CLIP)
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def saved(self, options: StateDictOptions) -> tuple[Any, Any]:
        return (
            get_model_state_dict(self.model, options=options),
            get_optimizer_state_dict(self.model, self.optimizer, options=options),
        )


def resume(kind: str, first: Any, second: Any, full: bool) -> dict[str, Any]:
    """Two steps with ``first``, two with ``second``, a checkpoint between them."""
    options = StateDictOptions(full_state_dict=full)
    before, after = Training(kind, first), Training(kind, second)
    for window in range(2):
        before.step(window)
    saved, state = before.saved(options)
    tensors = saved | {f"{n}.{k}": t for n, e in state["state"].items() for k, t in e.items()}
    found = {
        "kinds": {type(t).__name__ for entry in state["state"].values() for t in entry.values()},
        "saved": {name: whole(t) for name, t in sorted(tensors.items())},
    }
    set_model_state_dict(after.model, saved, options=options)
    set_optimizer_state_dict(after.model, after.optimizer, state, options=options)
    for window in range(2, 4):
        after.step(window)
    end = {"state": state_of(after.optimizer), "weights": weights(after.model.parameters())}
    for training in (before, after):
        if training.is_ours:
            training.optimizer.close()
    return found | end


def resume_delayed(kind: str, settings: Any, full: bool, is_resumed: bool) -> dict[str, Any]:
    """Six steps; after three of them a checkpoint, from which others go on if ``is_resumed``."""
    options = StateDictOptions(full_state_dict=full)
    training, found = Training(kind, settings), {}
    for window in range(6):
        if window == 3:
            saved, state = training.saved(options)
            entries = state["state"].values()
            found["kinds"] = {type(t).__name__ for e in entries for t in e.values() if t.dim()}
        if window == 3 and is_resumed:
            scale = training.scaler.state_dict()
            training.optimizer.close()
            training = Training(kind, settings)
            set_model_state_dict(training.model, saved, options=options)
            set_optimizer_state_dict(training.model, training.optimizer, state, options=options)
            training.scaler.load_state_dict(scale)
        training.step(window)
    stepper: Any = async_stepper_of(training.inner)
    assert stepper.wait()
    found["shown"] = weights(pair.target for pair in stepper.replica.pairs)
    found["exact"] = weights(pair.stepped for pair in stepper.replica.pairs)
    training.optimizer.synchronize()
    found["state"] = state_of(training.optimizer)
    found["weights"] = weights(training.model.parameters())
    training.optimizer.close()
    return found


@pytest.mark.parametrize("settings", SHOWN.values(), ids=SHOWN)
def test_a_checkpoint_between_late_steps_resumes_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Sharded or full: the run goes on as the one that has saved."""
    own: dict[str, Any] = {**settings, "delay_warmup_steps": settings.get("warmup", 0)}
    own.pop("warmup", None)

    def body() -> None:
        for kind in ("sgd", "adamw")["warmup" in settings :]:  # sgd's state has no count
            whole_run = resume_delayed(kind, own, False, False)
            for full in (False, True):
                mine = resume_delayed(kind, own, full, True)
                assert ("DTensor" in mine["kinds"]) is not full
                for key in ("shown", "exact", "weights"):
                    assert torch.equal(mine[key], whole_run[key]), (kind, full, key)
                assert all(map(torch.equal, mine["state"], whole_run["state"]))
            assert not torch.equal(whole_run["shown"], whole_run["weights"])

    on_two_ranks(body, tmp_path)


CHANGES: list[tuple[str, Any, Any, bool]] = [
    ("sgd", OVERLAP, None, False),
    ("adamw", None, OVERLAP | OFFLOAD, True),
    ("adamw", OVERLAP, OVERLAP, False),
    ("sgd", {"mode": "sync"} | OFFLOAD, OVERLAP, False),
]


def test_checkpoints_interchange_with_the_stock_optimizer(tmp_path: Path) -> None:
    """Through torch.distributed.checkpoint's state dicts, sharded or full, both directions.

    The model is loaded after the optimizer was wrapped, before its first step.
    """

    def body() -> None:
        for kind, first, second, full in CHANGES:
            with lazy():
                mine = resume(kind, first, second, full)
            stock = resume(kind, None, None, full)
            assert mine["kinds"] == stock["kinds"]
            assert ("DTensor" in mine["kinds"]) is not full
            assert mine["saved"].keys() == stock["saved"].keys()
            assert all(map(torch.equal, mine["saved"].values(), stock["saved"].values()))
            assert torch.equal(mine["weights"], stock["weights"])
            assert len(mine["state"]) == len(stock["state"]) > 0
            assert all(map(torch.equal, mine["state"], stock["state"]))

    on_two_ranks(body, tmp_path)


def test_a_read_on_another_thread_leaves_the_newest_to_the_one_that_trains(tmp_path: Path) -> None:
    """In ``delayed`` the other one sees what a forward would, one step before."""

    def shards(settings: dict[str, Any] | None) -> list[list[Any]]:
        training = Training("sgd", settings)
        params: list[Any] = list(training.model.parameters())
        found: list[list[Any]] = [[]]

        def read() -> None:
            found[-1] = [p.to_local().detach().clone() for p in params]

        for window in range(3):
            training.step(window)
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            found.append([])
            read()
            found.append([])
        if settings is not None:
            training.optimizer.close()
        assert {type(p) for p in params} == {DTensor}
        return found[:-1]

    def body() -> None:
        stock = shards(None)
        with lazy():
            mine = shards(DELAYED)
        assert same(mine[1::2], stock[1::2])
        assert not any(map(same, mine[0::2], stock[0::2]))

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize(
    "settings", [OVERLAP, DELAYED, PREVIEW], ids=["overlap", "delayed", "preview"]
)
def test_a_read_in_a_forward_sees_what_the_forward_does(settings: Any, tmp_path: Path) -> None:
    """Whether the worker is done by then or starts only when somebody waits."""

    def shards() -> list[Any]:
        training, found = Training("sgd", settings), list[Any]()
        params: list[Any] = list(training.model.parameters())

        def read(*_: object) -> None:
            found.append([p.to_local().detach().clone() for p in params])

        training.model.blocks[0].register_forward_pre_hook(read)
        for window in range(4):
            stepper: Any = async_stepper_of(training.inner)
            assert is_lazy or stepper.wait()
            training.step(window)
        training.optimizer.close()
        return [*found, weights(params)]

    def body() -> None:
        nonlocal is_lazy
        early = shards()
        is_lazy = True
        with lazy():
            assert same(shards(), early)

    is_lazy = False
    on_two_ranks(body, tmp_path)


def test_what_was_loaded_is_saved_without_a_step_between(tmp_path: Path) -> None:
    """A tensor of one element is its shard on rank 0, and a DTensor while it is only loaded."""

    def body() -> None:
        saved = []
        for settings in (None, {"mode": "sync"}, OVERLAP):
            training = Training("sgd", settings)
            training.step(0)
            first = training.saved(StateDictOptions())
            set_model_state_dict(training.model, first[0])
            set_optimizer_state_dict(training.model, training.optimizer, first[1])
            saved.append(state_of(training.optimizer))
        assert same(saved[1:], [saved[0]] * 2)

    on_two_ranks(body, tmp_path)


USES: dict[str, Callable[[Any], Any]] = {
    "copied": lambda p: type(copy.copy(p)),
    "copied deeply": lambda p: sorted(vars(copy.deepcopy(p))),
    "pickled": lambda p: torch.save(p, io.BytesIO()),
    "read": lambda p: type(p.to_local()),
    "swapped": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.ones_like(p.detach()))),
    "moved": lambda p: nn.ParameterList([p]).double()[0].dtype,  # swaps, too
    "asked for its class": lambda p: p.__class__,
}


class Never:
    """The order of a device that is past a part only once the host has waited for it."""

    def is_past(self, part: int, wait: bool) -> bool:
        return wait


def test_a_shard_that_stays_pending_behind_a_device_is_used_as_torchs(tmp_path: Path) -> None:
    """What copies or moves its attributes takes nothing of the wait with it."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, use in USES.items():
            plain, pending = (
                nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
                for _ in range(2)
            )
            order: Any = Never()
            assert can_hold_parameters([pending])
            hold = ParameterHold([pending], [1], {id(pending): 1}, lambda part: part, order)
            assert type(pending) is not DTensor
            assert use(pending) == use(plain), name
            hold.release()
            assert type(pending) is DTensor
            assert vars(pending) == vars(plain)
            assert torch.equal(pending.to_local(), plain.to_local())

    on_two_ranks(body, tmp_path)


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
    "transformers' Adafactor": Adafactor,
    "Own": Own,
}


def test_an_optimizer_that_a_shard_is_not_enough_for_is_refused(tmp_path: Path) -> None:
    """With the reason; and a second time the same, so the first left nothing behind."""

    def body() -> None:
        for name, make in MAKERS.items():
            model = shard(net())
            inner = make(list(model.parameters()))
            for mode in ("overlap", "delayed", "overlap"):
                with pytest.raises(UnsupportedError, match=f"^{name.split()[-1]} "):
                    AsyncOptimizer(inner, model, mode=mode)

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sharded_half_precision_parameters_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Before anything is changed."""

    def body() -> None:
        model, scaler = shard(net().to(dtype)), GradScaler("cpu", **SCALER)
        inner = optimizer_of("sgd", model.parameters())
        before = dict(vars(inner))
        for mode in ("sync", "overlap"):
            with pytest.raises(UnsupportedError, match=r"sharded.*float32"):
                AsyncOptimizer(inner, model, scaler=scaler, mode=mode)
        assert dict(vars(inner)) == before

    on_two_ranks(body, tmp_path)


def accelerate_shards_on_a_cpu() -> None:
    """Let ``MULTI_CPU`` into the list of kinds for which Accelerate takes FSDP, in this rank."""
    known = textwrap.dedent(inspect.getsource(AcceleratorState.__init__))
    first = "DistributedType.MULTI_GPU,"
    assert known.count(first) == 1
    names: dict[str, Any] = {}
    exec(known.replace(first, f"{first} DistributedType.MULTI_CPU,"), vars(accelerate.state), names)
    AcceleratorState.__init__ = names["__init__"]


def sharded_by_accelerate(precision: str, step_mode: str | None) -> tuple[Any, Any, Any]:
    """Accelerator, model and optimizer; without a mode stock, in fp16 with torch's scaler."""
    reset()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        fsdp_plugin=plugin,
        kwargs_handlers=[GradScalerKwargs(**SCALER)],
    )
    assert accelerator.distributed_type is DistributedType.FSDP
    if step_mode is not None:
        attach(accelerator, step_mode=step_mode)
    elif precision == "fp16":
        stock_fp16_on_cpu(accelerator)
    plain = net()
    model, optimizer = accelerator.prepare(plain, optimizer_of("sgd", plain.parameters()))
    assert all(hasattr(p, "placements") for p in model.parameters())
    return accelerator, model, optimizer


def trained_by_accelerate(precision: str, step_mode: str | None) -> list[Any]:
    accelerator, model, optimizer = sharded_by_accelerate(precision, step_mode)
    scaled = precision == "fp16"
    found: list[Any] = []
    for window in range(WINDOWS):
        x, y = batch(window, 0)
        loss = nn.functional.mse_loss(model(x).float(), y)
        is_bad = scaled and (window, dist.get_rank()) == (OVERFLOW, 1)
        accelerator.backward(loss * (float("inf") if is_bad else 1.0))
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        assert skipped == (scaled and window == OVERFLOW)
        found.append([loss.detach(), whole(norm).isfinite(), skipped or whole(norm)])
    scale = accelerator.scaler.get_scale() if scaled else 1.0
    return [*found, scale, weights(model.parameters()), state_of(optimizer)]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerates_own_fsdp2_trains_as_stock(precision: str, tmp_path: Path) -> None:
    def body() -> None:
        accelerate_shards_on_a_cpu()
        stock, *ours = (trained_by_accelerate(precision, m) for m in (None, "sync", "overlap"))
        assert [same(run, stock) for run in ours] == [True, True], [stock, *ours]

    on_two_ranks(body, tmp_path)


def test_load_state_under_fsdp2_leaves_the_scaler_as_it_was_saved(tmp_path: Path) -> None:
    """Stock counts a step that torch makes to have some state, and the scale may grow at it
    (accelerate #4289)."""

    def body() -> None:
        accelerate_shards_on_a_cpu()
        for mode in (None, "sync", "overlap"):
            accelerator, model, optimizer = sharded_by_accelerate("fp16", mode)
            for window in range(3):
                loss = nn.functional.mse_loss(model(batch(window, 0)[0]).float(), batch(0, 0)[1])
                accelerator.backward(loss * (float("inf") if window == 0 else 1.0))
                optimizer.step()
                optimizer.zero_grad()
            saved, path = accelerator.scaler.state_dict(), str(tmp_path / str(mode))
            accelerator.save_state(path)
            if mode is None:
                with pytest.raises(AssertionError, match="_growth_tracker initialized before"):
                    accelerator.load_state(path)
            else:
                accelerator.load_state(path)
                assert accelerator.scaler.state_dict() == saved
            fresh, *_ = sharded_by_accelerate("fp16", mode)
            fresh.load_state(path)
            assert (saved["scale"], saved["_growth_tracker"]) == (512.0, 2)
            grown = {"scale": 1024.0, "_growth_tracker": 0} if mode is None else {}
            assert fresh.scaler.state_dict() == saved | grown

    on_two_ranks(body, tmp_path)
