"""torch's FSDP2 and tensor parallelism on two gloo ranks: torch's numbers, bit for bit.

Of shards ``overlap`` waits in ``step()``. The optimizer thread updates a part when somebody waits
for it (``lazy``), so a wait that is missing shows.
"""

from __future__ import annotations

import copy
import inspect
import textwrap
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
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.optimization import Adafactor
from two_ranks import (
    CLIP,
    OVERFLOW,
    OVERLAP,
    SCALER,
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

pytestmark = before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")


def shard(model: Any, *, root: bool = True, **kwargs: Any) -> Any:
    """Each block and the head a group, the rest the root's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.blocks, model.head):
        fully_shard(block, mesh=mesh, **kwargs)
    if root:
        fully_shard(model, mesh=mesh, **kwargs)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {"float32": shard}
LAYOUTS["bf16"] = partial(shard, mp_policy=BF16)
RUNS: dict[str, dict[str, Any]] = {
    "overlap": OVERLAP,
    "overlap backwards": OVERLAP | {"order": lambda params: params[::-1]},
    "overlap reduced": OVERLAP | {"hold_back": False},
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("sgd", "float32"), ("sgd", "bf16"), ("adamw", "float32"), ("fused", "float32")],
)
def test_both_modes_equal_torch_on_the_same_ranks(kind: str, layout: str, tmp_path: Path) -> None:
    """Losses, norms, scales, rates, parameters, optimizer state, and an overflow in one shard."""
    runs = RUNS if (kind, layout) == ("sgd", "float32") else {"overlap": OVERLAP}
    on_two_ranks(lambda: compare(runs, LAYOUTS[layout], kind), tmp_path)


def test_parameters_that_are_not_sharded_are_stepped_beside_those_that_are(tmp_path: Path) -> None:
    """Unscaled: torch cannot unscale or clip sharded and plain gradients together."""
    wrap = partial(shard, root=False)
    on_two_ranks(lambda: compare({"overlap": OVERLAP}, wrap, "sgd", scaled=False), tmp_path)


def test_our_scaler_in_torchs_own_loop_is_torchs(tmp_path: Path) -> None:
    """``unscale_``, clip, ``step``, ``update``: an inf in one shard is found on both ranks."""

    def body() -> None:
        brain = lambda model: shard(model.bfloat16())  # noqa: E731
        for wrap in (shard, brain):
            mine, theirs = (
                reference(wrap, "sgd", kind_of_scaler=scaler)
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


CHANGES: list[tuple[str, Any, Any, bool]] = [
    ("sgd", OVERLAP, None, False),
    ("adamw", None, OVERLAP, True),
    ("adamw", OVERLAP, OVERLAP, False),
    ("sgd", {"step_mode": "sync"}, OVERLAP, False),
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


def test_what_was_loaded_is_saved_without_a_step_between(tmp_path: Path) -> None:
    """A tensor of one element is its shard on rank 0, and a DTensor while it is only loaded."""

    def body() -> None:
        saved = []
        for settings in (None, {"step_mode": "sync"}, OVERLAP):
            training = Training("sgd", settings)
            training.step(0)
            first = training.saved(StateDictOptions())
            set_model_state_dict(training.model, first[0])
            set_optimizer_state_dict(training.model, training.optimizer, first[1])
            saved.append(state_of(training.optimizer))
        assert same(saved[1:], [saved[0]] * 2)

    on_two_ranks(body, tmp_path)


def sharded() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    fully_shard(model[0])
    fully_shard(model)
    return model  # type: ignore[no-any-return]


def parallel() -> nn.Module:
    """The first layer in columns; the second is on each rank."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model[0], mesh, ColwiseParallel(output_layouts=Replicate()))
    return model


def edited(p: Any) -> Tensor:
    with torch.no_grad():
        p.mul_(0.5)
    return whole(p)


READS: dict[str, Callable[[Any], Any]] = {
    "full_tensor": whole,
    "to_local": lambda p: p.to_local().detach().clone(),
    "_local_tensor": lambda p: p._local_tensor.detach().clone(),
    "deepcopy": lambda p: whole(copy.deepcopy(p)),
    "edited": edited,
}


def read_between_steps(make: Any, is_ours: bool, read: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(3)
    model, found = make(), []
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer: Any = AsyncOptimizer(inner, model, step_mode="overlap") if is_ours else inner
    for step in range(3):
        model(batch(step, 0)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([read(p) for p in model.parameters() if hasattr(p, "to_local")])
    if is_ours:
        optimizer.close()
    return found


@pytest.mark.parametrize("make", [sharded, parallel])
def test_a_read_of_shards_between_steps_is_torchs(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def body() -> None:
        for name, read in READS.items():
            with lazy():
                mine = read_between_steps(make, True, read)
            assert same(mine, read_between_steps(make, False, read)), name

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
            for _ in range(2):
                with pytest.raises(UnsupportedError, match=f"^{name.split()[-1]} "):
                    AsyncOptimizer(inner, model, step_mode="overlap")

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
                AsyncOptimizer(inner, model, scaler=scaler, step_mode=mode)
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
