"""A GPT-2-like model, and each way to train it that gpu.py compares, set up as its own docs advise.

Every peer is called through its documented interface. A peer that is not installed is absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from torch import Tensor, nn

import accel_scaler
from accel_scaler import attach, detach

MINE = "accel_scaler"
LR, CLIP = 1e-4, 1.0


@dataclass(frozen=True)
class Shape:
    """Of the model and of one micro-batch."""

    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    batch: int
    tied: int = 0
    """1: the last layer has the weight of the first, as in GPT-2."""

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        ends = (2 - self.tied) * self.vocab * self.width
        ends += self.length * self.width + 2 * self.width
        return self.layers * block + ends


@dataclass(frozen=True)
class Job:
    """The task of one variant."""

    shape: Shape
    device: str
    accumulation: int


@dataclass
class Loop:
    """A variant, ready to train. ``window``: one optimizer step over its micro-batches."""

    window: Callable[[list[Tensor]], None]
    finish: Callable[[], None] = lambda: None
    model: nn.Module | None = None
    threads: str = field(default_factory=lambda: f"{torch.get_num_threads()}")


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    set_up: Callable[[Job], Loop]
    package: str = "torch"
    note: str = ""
    peer: str = "stock"
    """Whose speed is 1."""

    @property
    def version(self) -> str:
        if self.package == MINE:
            return f"{MINE} {accel_scaler.__version__}"
        try:
            return f"{self.package} {version(self.package)}"
        except PackageNotFoundError:
            return f"{self.package}: not installed"

    @property
    def is_installed(self) -> bool:
        return not self.version.endswith("not installed")


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.tokens(tokens) + self.places(places)
        return embedded


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        result: Tensor = x + self.down(hidden)
        return result


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


def model_of(job: Job, dtype: torch.dtype, device: str | None = None) -> nn.Sequential:
    """GPT-2's layers in a row, the same numbers each time."""
    torch.manual_seed(0)
    shape = job.shape
    with torch.device(device or job.device):
        layers: list[nn.Module] = [Embedding(shape).to(dtype)]
        layers += [Block(shape).to(dtype) for _ in range(shape.layers)]
        layers += [Head(shape).to(dtype)]
    model = nn.Sequential(*layers)
    if shape.tied:
        last: Any = model[-1]
        last.logits.weight = cast(Any, model[0]).tokens.weight
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    return model


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )
    return loss


def torch_loop(
    job: Job,
    model: Any,
    optimizer: Any,
    *,
    dtype: torch.dtype = torch.float16,
    cast: bool = True,
    scale: bool = True,
    clip: bool = True,
    last_is: Callable[[bool], None] = lambda last: None,
) -> Loop:
    """torch's documented loop for mixed precision with accumulation and clipping."""
    scaler = torch.amp.GradScaler(job.device, enabled=scale)

    def window(batches: list[Tensor]) -> None:
        for number, tokens in enumerate(batches, 1):
            last_is(number == len(batches))
            with torch.autocast(job.device, dtype=dtype, enabled=cast):
                loss = loss_of(model(tokens), tokens) / len(batches)
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Loop(window, model=model)


def stock(job: Job) -> Loop:
    model = model_of(job, torch.float32)
    return torch_loop(job, model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def accelerate(
    precision: str, dtype: torch.dtype = torch.float32, settings: dict[str, Any] | None = None
) -> Callable[[Job], Loop]:
    """Accelerate's documented loop; with ``settings``, attached to this package."""

    def set_up(job: Job) -> Loop:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        accelerator = Accelerator(
            cpu=job.device == "cpu",
            mixed_precision=precision,
            gradient_accumulation_steps=job.accumulation,
        )
        if settings is not None:
            attach(accelerator, **settings)
        model = model_of(job, dtype)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)

        def window(batches: list[Tensor]) -> None:
            for tokens in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model(tokens), tokens))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()

        def finish() -> None:
            if settings is not None:
                detach(accelerator)

        return Loop(window, finish, model)

    return set_up


def torchao(job: Job) -> Loop:
    """Its docs: all in bfloat16, a fused optimizer on the CPU. Its step takes no clipping."""
    from torchao.optim import CPUOffloadOptimizer

    model = model_of(job, torch.bfloat16)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return torch_loop(job, model, optimizer, cast=False, scale=False, clip=False)


def bitsandbytes(bits: int) -> Callable[[Job], Loop]:
    def set_up(job: Job) -> Loop:
        import bitsandbytes as bnb

        model = model_of(job, torch.float32)
        cls = bnb.optim.PagedAdamW32bit if bits == 32 else bnb.optim.PagedAdamW8bit
        optimizer = cls(model.parameters(), lr=LR)
        manager = bnb.optim.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # as the docs ask for with 8 bits
                manager.register_module_override(module, "weight", {"optim_bits": 32})
        return torch_loop(job, model, optimizer)

    return set_up


def fsdp2(job: Job) -> Loop:
    """One rank; parameters, gradients and the step in host memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backends = "gloo" if job.device == "cpu" else f"cpu:gloo,{job.device}:nccl"
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(job.device, (1,))
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=job.device != "cpu"),
    }
    model: Any = model_of(job, torch.float32, "cpu")
    for layer in model:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    last_is = model.set_requires_gradient_sync
    return torch_loop(job, model, optimizer, cast=False, last_is=last_is)


def deepspeed(job: Job) -> Loop:
    """ZeRO-Offload: stage 2, its own CPU Adam, pinned memory."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29511"))
    import deepspeed

    model = model_of(job, torch.float16)
    config = {
        "train_micro_batch_size_per_gpu": job.shape.batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": CLIP,
        "fp16": {"enabled": True, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def window(batches: list[Tensor]) -> None:
        for tokens in batches:
            engine.backward(loss_of(engine(tokens), tokens))
            engine.step()

    return Loop(window, model=engine)


def roundpipe(job: Job) -> Loop:
    """The window in one call, which it cuts up by itself. Its documented example does not clip."""
    from roundpipe import GradScaler, RoundPipe
    from roundpipe.optim import Adam

    scaler = GradScaler()
    model = RoundPipe(model_of(job, torch.float16, "cpu"), optim_dtype=torch.float32)
    optimizer = Adam(model.optim_parameters(), lr=LR)

    def window(batches: list[Tensor]) -> None:
        tokens = torch.cat([batch.cpu() for batch in batches])
        model.forward_backward(
            input_args=(tokens,),
            label=tokens,
            loss_fn=lambda out, label: scaler.scale(loss_of(out, label)) / len(batches),
        )
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        scaler.update()

    return Loop(window)


FULL, HALF = torch.float32, torch.float16
VARIANTS = {
    v.name: v
    for v in (
        Variant("stock", stock, note="float32 weights, fp16 autocast, fused AdamW"),
        Variant("accelerate", accelerate("fp16"), "accelerate", note="float32 weights, fp16"),
        Variant("sync", accelerate("fp16", FULL, {}), MINE),
        Variant(
            "offload",
            accelerate("fp16", HALF, {"offload": "cpu"}),
            MINE,
            note="float16 weights, masters",
        ),
        Variant(
            "accelerate bf16", accelerate("bf16"), "accelerate", peer="accelerate bf16", note="bf16"
        ),
        Variant("sync bf16", accelerate("bf16", FULL, {}), MINE, peer="accelerate bf16"),
        Variant("torchao", torchao, "torchao", note="CPUOffloadOptimizer, bfloat16, no clipping"),
        Variant("bnb 32", bitsandbytes(32), "bitsandbytes", note="PagedAdamW32bit"),
        Variant("bnb 8", bitsandbytes(8), "bitsandbytes", note="PagedAdamW8bit"),
        Variant("fsdp2", fsdp2, note="CPUOffloadPolicy, float16, AdamW on the CPU"),
        Variant("deepspeed", deepspeed, "deepspeed", note="ZeRO-Offload, stage 2"),
        Variant("roundpipe", roundpipe, "roundpipe", note="one-step delay, no clipping"),
    )
}
