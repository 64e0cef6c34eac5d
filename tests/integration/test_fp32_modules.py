"""``fp32_modules`` in models of transformers: a Trainer, gradient checkpointing, LoRA, compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attached import cpu
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trainer_support import CONFIG, gpt2, make
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scaler import ScalerConfig, attach, detach

BLOCK = "transformer.h.1.mlp"


def by_hand(model: Any, name: str) -> Any:
    """Its class's forward, written out in float32."""
    module = model.get_submodule(name)

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return type(module).forward(module, x.float())

    module.forward = forward
    return model


def run(path: Path, model: Any, globs: Any = (), **kwargs: Any) -> list[Tensor]:
    config = ScalerConfig(
        init_scale=CONFIG.init_scale, growth_interval=CONFIG.growth_interval, fp32_modules=globs
    )
    trainer, recorder = make(path, (), model=model, **kwargs)
    attach(trainer, config)
    trainer.train()
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    detach(trainer)
    assert any(recorder.scales)
    assert not any("forward" in vars(each) for each in model.modules()) or not globs
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_trainer_with_and_without_gradient_checkpointing(
    tmp_path: Path, reentrant: bool | None
) -> None:
    kwargs: dict[str, Any] = {"max_steps": 3, "gradient_checkpointing": reentrant is not None}
    if reentrant is not None:
        kwargs["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    expected = run(tmp_path / "a", by_hand(gpt2(), BLOCK), **kwargs)
    assert_equal(run(tmp_path / "b", gpt2(), ["*h.1.mlp"], **kwargs), expected)
    plain = run(tmp_path / "c", gpt2(), **kwargs)
    assert not torch.equal(plain[-1], expected[-1]), "float16 would have passed"


@pytest.mark.parametrize("glob", ["*up_proj", "*.layers.1"])
def test_lora_on_a_float16_model(glob: str) -> None:
    """float16 weights and float32 adapters in one module; neither checkpoints nor the optimizer
    thread change a number. transformers' layers checkpoint their own forward, so that it runs
    again without ours around it."""

    def found(reentrant: bool | None, mode: Any) -> list[Tensor]:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["up_proj", "q_proj"], init_lora_weights=False)
        model: Any = get_peft_model(llama().half(), config)
        if reentrant is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        settings = ScalerConfig(init_scale=128.0, fp32_modules=[glob], step_mode=mode)
        accelerator = attach(cpu(), settings)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.SGD(trained, lr=0.5)
        model, optimizer = accelerator.prepare(model.train(), optimizer)
        ids = torch.arange(12).reshape(2, 6)
        for _ in range(3):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        detach(accelerator)
        assert not any("forward" in vars(each) for each in model.modules())
        return [p.detach().clone() for p in trained]

    expected = found(None, "sync")
    assert_equal(found(True, "sync"), expected)
    assert_equal(found(False, "overlap"), expected)


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
