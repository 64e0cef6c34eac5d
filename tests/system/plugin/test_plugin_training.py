"""TRL's trainer and peft's LoRA, as scripts that know nothing of us, under the plugin.

Beside each the same script under stock Accelerate, its fp16 switched on as a GPU would: losses,
norms, rates, skips, weights and optimizer state are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accel_scaler_replacing import Replacement
from accelerate import Accelerator
from accelerate.utils import set_seed
from support import reset, same, stock_fp16_on_cpu
from trainer_support import arguments, examples, gpt2, logs, sft_trainer
from transformers import Trainer

import accel_scaler

pytest.importorskip("datasets")
peft, _ = pytest.importorskip("peft"), pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("one_thread", "torchs_own_products")
BAD = (2, 7)
"""Backwards whose gradients overflow."""
RUN: dict[str, Any] = {
    **{"max_steps": 5, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    **{"optim": "adamw_torch", "save_strategy": "no", "logging_steps": 1},
}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Stock leaves scaler and autocast off on a CPU (F6 in docs/what-to-expect.md)."""
    init = Accelerator.__init__

    def __init__(accelerator: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(accelerator, *args, **kwargs)
        stock_fp16_on_cpu(accelerator)

    Accelerator.__init__ = __init__
    yield
    Accelerator.__init__ = init


@contextmanager
def replaced(folder: Path) -> Iterator[Replacement]:
    """As ``--with-accel-scaler`` does it."""
    (folder / "tally").touch()
    startup = Path(accel_scaler.__file__).parent / "launch" / "startup"
    replacement = Replacement(str(startup), str(folder / "tally"))
    replacement.install()
    yield replacement
    replacement.undo()


def lora() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(gpt2(), config)
    count = iter(range(100))

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, float("inf")) if next(count) in BAD else grad

    [p for p in adapted.parameters() if p.requires_grad][-1].register_hook(spoil)
    return adapted


def sft(folder: Path) -> Any:
    return sft_trainer(gpt2(BAD), **arguments(folder, **RUN).to_dict())


def lora_trainer(folder: Path) -> Any:
    return Trainer(lora(), arguments(folder, **RUN), train_dataset=examples(20))


def left_by(script: Any, folder: Path) -> list[Any]:
    """All that a training leaves, exactly."""
    reset()
    set_seed(3)
    made = script(folder)
    made.train()
    seen = [{key: str(value) for key, value in entry.items()} for entry in logs(made)]
    return [seen, made.model.state_dict(), made.optimizer.state_dict()["state"]]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("script", [sft, lora_trainer])
def test_a_training_of_theirs_leaves_what_stock_leaves(
    script: Any, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with as_on_a_gpu():
        stock = left_by(script, tmp_path)
    assert str(stock[0]).count("'inf'") == 2, "two windows overflowed"
    assert all(float(entry["step"]) == 3.0 for entry in stock[2].values())
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    with replaced(tmp_path) as replacement:
        ours = left_by(script, tmp_path)
    assert replacement.counts() == {"accelerator": 1, "trainer": 1}
    assert same(ours, stock)
