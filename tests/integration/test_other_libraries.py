"""docs/other-libraries.md: its lines, beside stock, in the loop of each library; and the way back.

Its commands are run in tests/system/plugin/test_commands_of_the_page.py.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from places import ROOT
from references import loss_of, network
from support import reset, same, stock_fp16_on_cpu
from trainer_support import arguments, examples, gpt2
from transformers import Trainer, set_seed

from accel_scaler import AsyncOptimizer, GradScaler, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread", "torchs_own_products")

PAGE = (ROOT / "docs/other-libraries.md").read_text("utf-8")
BLOCKS = {
    part.split("\n", 1)[0]: re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    for part in PAGE.split("\n## ")
}
RUN: dict[str, Any] = {
    **{"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2},
    **{"max_steps": 4, "lr_scheduler_type": "constant", "warmup_steps": 0},
}


def as_on_a_gpu(trainer: Any, **settings: Any) -> Any:
    """In place of ``attach``: what stock does there."""
    stock_fp16_on_cpu(trainer.accelerator)
    return trainer


def run(lines: str, **names: Any) -> Any:
    """The trainer of these lines, and all that it leaves."""
    reset()
    set_seed(3)
    known = {"attach": attach, "Trainer": Trainer, "data": examples(16), **names}
    known["args"] = names["args"]()
    exec(lines if ".train(" in lines else lines + "trainer.train()", known)
    trainer = known["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == trainer.state.global_step == trainer.args.max_steps
    state = trainer.optimizer.state_dict()["state"]
    return trainer, [losses, trainer.model.state_dict(), state]


def test_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    (lines,) = BLOCKS["PEFT"]
    names = {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}
    names["args"] = partial(arguments, tmp_path, **RUN)
    trainer, ours = run(lines, model=gpt2(), **names)
    assert len(trainer.accelerator.scaler_history.records) == 4
    _, stock = run(lines, model=gpt2(), attach=as_on_a_gpu, **names)
    assert same(ours, stock)
    assert all(bool(p.any()) for name, p in ours[1].items() if "lora_B" in name)


def test_adapters_in_bfloat16_with_masters_equal_adapters_in_float32(tmp_path: Path) -> None:
    """docs/bf16.md: bit for bit under autocast, without accumulation; in place they do not."""
    peft = pytest.importorskip("peft")
    run_of = {**RUN, "gradient_accumulation_steps": 1, "max_steps": 8, "save_strategy": "no"}

    def trained(in_float32: bool, **settings: Any) -> tuple[list[float], list[torch.Tensor]]:
        reset()
        set_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        base = gpt2().to(torch.bfloat16)
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=in_float32)
        args = arguments(tmp_path, **run_of, fp16=False, bf16=True)
        trainer = attach(Trainer(model, args, train_dataset=examples(16)), **settings)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        adapters = [p.detach() for p in model.parameters() if p.requires_grad]
        entries = trainer.optimizer.state_dict()["state"].values()
        pairs = zip(entries, adapters, strict=True)
        return losses, [entry.get("master", p).float() for entry, p in pairs]

    float32 = trained(True)
    assert len(float32[0]) == 8
    assert same(float32, trained(False, master_weights="fp32"))
    assert not same(float32[1], trained(False, master_weights="none")[1])


def test_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.0", reason="an older GRPOTrainer has other arguments")
    from datasets import Dataset
    from test_grpo import LETTERS, llama, tokenizer
    from trl import GRPOConfig

    (lines,) = BLOCKS["TRL"]
    llama(torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    names = {
        "args": lambda: GRPOConfig(
            **arguments(tmp_path, **RUN).to_dict() | {"gradient_accumulation_steps": 1},
            **{"num_generations": 2, "max_completion_length": 4},
        ),
        "data": Dataset.from_list([{"prompt": a + b} for a in LETTERS for b in LETTERS]),
        "reward": lambda completions, **_: [text.count("a") / 4 for text in completions],
        "model": str(tmp_path / "model"),
    }
    trainer, ours = run(lines, **names)
    assert len(trainer.accelerator.scaler_history.records) == 4
    lines = lines.replace("from accel_scaler import attach\n", "")
    _, stock = run(lines, attach=as_on_a_gpu, **names)
    assert same(ours, stock)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_diffusers(mode: str) -> None:
    """A U-Net, its noise, its average: as ``train_unconditional.py`` has them."""
    pytest.importorskip("diffusers")
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    (line,) = re.findall(r"`(attach\(accelerator\))`", PAGE)
    found = []
    for lines in ("", line):
        reset()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        exec(
            lines, {"attach": lambda each: attach(each, step_mode=mode), "accelerator": accelerator}
        )
        model: Any = UNet2DModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(8, 8),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        average = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        noises = DDPMScheduler(num_train_timesteps=100)
        for _ in range(6):
            clean, noise = torch.rand(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
            times = torch.randint(0, 100, (2,))
            with accelerator.accumulate(model):
                out = model(noises.add_noise(clean, noise, times), times).sample
                accelerator.backward(torch.nn.functional.mse_loss(out.float(), noise))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
        state = optimizer.state_dict()["state"]
        assert state[0]["step"] == 3
        found.append([model.state_dict(), state, average.state_dict()["shadow_params"]])
        detach(accelerator)
    assert same(*found)


def test_nanogpt() -> None:
    """Half of the run is ours, then torch goes on from its state dicts."""
    replaced, hooked = BLOCKS["nanoGPT"]
    made, clipped, stepped = hooked.split("\n\n")[:3]
    torchs = "scaler = torch.amp.GradScaler('cpu', enabled=(dtype == 'float16'))"
    clip = "scaler.unscale_(optimizer)\n"
    clip += "torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)"
    step = "scaler.step(optimizer)\nscaler.update()"

    def start(scaler: str) -> dict[str, Any]:
        found = {"torch": torch, "GradScaler": GradScaler, "AsyncOptimizer": AsyncOptimizer}
        found |= {"model": network(), "dtype": "float16", "grad_clip": 0.5}
        found["optimizer"] = torch.optim.AdamW(found["model"].parameters(), lr=0.05)
        exec(scaler, found)
        return found

    def train(names: dict[str, Any], steps: range, clip: str, step: str) -> None:
        scaler, optimizer = names["scaler"], names["optimizer"]
        for iteration in steps:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + iteration)
            for micro in range(2):
                loss = loss_of(names["model"], 2 * iteration + micro, iteration == 0) / 2
                scaler.scale(loss).backward()
            exec(clip, names)
            exec(step, names)
            optimizer.zero_grad(set_to_none=True)

    expected = start(torchs)
    train(expected, range(10), clip, step)
    assert expected["scaler"].get_scale() == 2.0**15
    for lines in ([clip, step], [clipped, stepped]):
        ours, names = start(replaced), start(torchs)
        inner = ours["optimizer"]
        if lines[0] is clipped:
            exec(made, ours)
        train(ours, range(5), *lines)
        for name in ("model", "optimizer", "scaler"):
            names[name].load_state_dict(ours[name].state_dict())
        if ours["optimizer"] is not inner:
            ours["optimizer"].close()
        train(names, range(5, 10), clip, step)
        for name in ("model", "optimizer", "scaler"):
            assert same(names[name].state_dict(), expected[name].state_dict()), name


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_stock_trainer_goes_on_where_an_attached_one_stopped(mode: str, tmp_path: Path) -> None:
    """In bf16 as stock alone would; float16 weights go on in float32."""
    (lines,) = BLOCKS["Turn it off, and go back"]
    bf16 = RUN | {"fp16": False, "bf16": True}
    _, whole = run(
        lines.replace("resume_from_checkpoint=True", ""),
        model=gpt2(),
        args=partial(arguments, tmp_path / "whole", **bf16),
    )
    attached = "trainer = attach(Trainer(model, args, train_dataset=data), step_mode=mode)\n"
    for dtype, plan in ((torch.float32, bf16), (torch.float16, RUN)):
        folder = tmp_path / str(dtype)
        half = partial(arguments, folder, **plan | {"max_steps": 2})
        run(attached, model=gpt2().to(dtype), args=half, mode=mode)
        (folder / "checkpoint-2/scaler.pt").unlink(missing_ok=True)  # bf16 has none
        trainer, found = run(lines, model=gpt2(), args=partial(arguments, folder, **bf16))
        assert type(trainer.accelerator) is Accelerator
        assert {float(each["step"]) for each in found[2].values()} == {4.0}
        if dtype is torch.float32:
            assert same(found, whole)


def test_without_attach_nobody_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", "nonsense")
    assert type(Accelerator(cpu=True)) is Accelerator
