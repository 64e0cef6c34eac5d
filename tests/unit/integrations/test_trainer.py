"""attach and detach on a Trainer: which classes change, which settings hold, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import mlp
from transformers import Trainer, TrainingArguments

from accel_scaler import (
    ConfigError,
    GradScaler,
    OrderError,
    ScaledAccelerator,
    ScalerConfig,
    attach,
    detach,
)
from accel_scaler.integrations.attachment import attachment_of
from accel_scaler.integrations.trainer import ScaledTrainer


def make(path: Path, cls: type[Trainer] = Trainer, **kwargs: Any) -> Any:
    arguments = TrainingArguments(
        **{"output_dir": str(path), "fp16": True, "use_cpu": True, "report_to": "none", **kwargs}
    )
    return cls(model=mlp(), args=arguments)


def test_attach_changes_the_two_classes_and_detach_leaves_nothing_behind(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    accelerator = trainer.accelerator
    # Fault F6: fp16 was asked for, and stock trains in float32.
    assert (accelerator.mixed_precision, accelerator.native_amp) == ("fp16", False)
    names = set(vars(trainer)), set(vars(accelerator))
    for _ in range(2):
        assert attach(trainer) is trainer
    assert type(trainer) is ScaledTrainer
    assert accelerator.native_amp is True
    assert trainer.accelerator is accelerator
    assert type(accelerator) is ScaledAccelerator
    assert isinstance(accelerator.scaler, GradScaler)
    accelerator.scaler.scale(torch.ones(1))
    with pytest.raises(OrderError, match="a step is under way"):
        detach(trainer)
    assert type(trainer) is ScaledTrainer
    accelerator.scaler.abandon_window()
    for _ in range(2):
        assert detach(trainer) is trainer
    assert type(trainer) is Trainer
    assert type(accelerator) is Accelerator
    assert (accelerator.scaler, accelerator.native_amp) == (None, False)
    assert (set(vars(trainer)), set(vars(accelerator))) == names


def test_an_accelerator_made_again_is_attached_with_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is read once, by attach: later accelerators keep what it said then."""
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "32")
    trainer = attach(make(tmp_path))
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "64")
    first = trainer.accelerator
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator is not first
    assert trainer.accelerator.scaler is not first.scaler
    assert isinstance(trainer.accelerator, ScaledAccelerator)
    assert trainer.accelerator.scaler.get_scale() == 32.0
    detach(trainer)
    trainer.create_accelerator_and_postprocess()
    assert type(trainer.accelerator) is Accelerator


def test_a_trainer_whose_accelerator_is_attached_already(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    attach(trainer.accelerator, ScalerConfig(init_scale=8.0))
    scaler = trainer.accelerator.scaler
    attach(trainer)
    assert trainer.accelerator.scaler is scaler
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator.scaler.get_scale() == 8.0


def test_a_trainer_takes_settings_by_name_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "32")
    trainer = attach(make(tmp_path), {"hysteresis": 3}, step_mode="overlap")
    monkeypatch.delenv("ACCEL_SCALER_INIT_SCALE")
    expected = ScalerConfig(init_scale=32.0, hysteresis=3, step_mode="overlap")
    assert attachment_of(trainer.accelerator).config == expected
    assert attach(trainer, step_mode="overlap") is trainer
    with pytest.raises(OrderError, match="step_mode='overlap', not 'sync'; call detach"):
        attach(trainer, step_mode="sync")
    trainer.create_accelerator_and_postprocess()
    assert attachment_of(trainer.accelerator).config == expected
    assert type(detach(trainer)) is Trainer
    for wrong in ({"step_mod": "overlap"}, {"fp32_modules": ["*.none"]}):
        with pytest.raises(ConfigError, match=r"Did you mean step_mode|\*.none"):
            attach(trainer, **wrong)
        assert type(trainer) is Trainer
        assert type(trainer.accelerator) is Accelerator


def test_a_subclass_keeps_its_own_methods_and_gets_its_class_back(tmp_path: Path) -> None:
    class Own(Trainer):
        made = 0

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            type(self).made += 1

    trainer = attach(make(tmp_path, Own))
    assert isinstance(trainer, Own)
    assert isinstance(trainer, ScaledTrainer)
    assert type(trainer).__name__ == "ScaledOwn"
    assert type(attach(make(tmp_path, Own))) is type(trainer)
    made = Own.made
    trainer.create_accelerator_and_postprocess()
    assert type(trainer).made == made + 1
    assert isinstance(trainer.accelerator, ScaledAccelerator)
    assert type(detach(trainer)) is Own


NO_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from accelerate import Accelerator
from accel_scaler import ScaledAccelerator, attach, detach
accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"))
assert type(accelerator) is ScaledAccelerator
assert type(detach(accelerator)) is Accelerator
assert sys.modules["transformers"] is None
assert "accel_scaler.integrations.trainer" not in sys.modules
"""


@pytest.mark.process
def test_a_raw_accelerator_needs_no_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TRANSFORMERS],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
