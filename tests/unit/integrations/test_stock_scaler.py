"""Settings and state of the scaler that is replaced; who scales in this package's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, GradScalerKwargs
from attached import assert_untouched, cpu, prepared, train
from support import stock, weights

from accel_scaler import ScalerConfig, UnsupportedError, attach, detach

INF = float("inf")


def test_the_stock_scaler_goes_on_with_the_present_scale() -> None:
    accelerator = attach(stock(), ScalerConfig(growth_interval=100))
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, 2, INF)
    train(accelerator, model, optimizer, 3)
    detach(accelerator)
    attach(accelerator, ScalerConfig(init_scale=4.0, growth_interval=100))
    assert accelerator.scaler.get_scale() == 2.0**14, "taken for a scaler at its start"
    detach(accelerator)
    assert type(accelerator.scaler) is torch.amp.GradScaler
    state = accelerator.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (2.0**14, 3)
    train(accelerator, model, optimizer, 1, INF)
    assert accelerator.scaler.get_scale() == 2.0**13
    assert optimizer.step_was_skipped is True


def test_attach_in_the_middle_keeps_scale_and_tracker() -> None:
    """And the rest of the run is what stock would have done."""
    config = ScalerConfig(init_scale=4.0)
    ends = []
    for attached in (True, False):
        accelerator = stock(kwargs_handlers=[GradScalerKwargs(growth_interval=5)])
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, 1, INF)
        train(accelerator, model, optimizer, 3)
        if attached:
            attach(accelerator, config)
            assert accelerator.scaler.get_scale() == 2.0**15
            assert accelerator.scaler._get_growth_tracker() == 3
        train(accelerator, model, optimizer, 3)
        assert accelerator.scaler.get_scale() == 2.0**16
        ends.append((weights(model), accelerator.scaler.state_dict()["_growth_tracker"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] == 1


def test_a_disabled_scaler_stays_disabled() -> None:
    """The stock one that is replaced, or ours by its settings; detach hands the stock one back."""
    accelerator = attach(stock(kwargs_handlers=[GradScalerKwargs(enabled=False)]), ScalerConfig())
    assert accelerator.scaler.is_enabled() is False
    model, optimizer = prepared(accelerator)
    before = weights(model)
    assert not torch.equal(weights(train(accelerator, model, optimizer)), before)
    assert optimizer.step_was_skipped is False
    detach(accelerator)
    assert accelerator.scaler.is_enabled() is False
    accelerator = attach(stock(), ScalerConfig(enabled=False))
    assert accelerator.scaler.get_scale() == 1.0
    assert detach(accelerator).scaler.get_scale() == 2.0**16


def test_new_bounds_hold_for_a_scale_that_training_has_reached() -> None:
    for low, high, scale in ((2.0**17, None, 2.0**17), (None, 8.0, 8.0)):
        accelerator = stock()
        accelerator.scaler.scale(torch.ones(()))
        attach(accelerator, ScalerConfig(init_scale=scale, min_scale=low, max_scale=high))
        assert accelerator.scaler.get_scale() == scale


@pytest.mark.parametrize(
    ("kind", "precision", "who"),
    [
        (DistributedType.DEEPSPEED, "fp16", "DeepSpeed's engine"),
        (DistributedType.MEGATRON_LM, "fp16", "Megatron-LM's optimizer"),
        (DistributedType.XLA, "fp16", "torch_xla"),
        (DistributedType.NO, "fp8", "TransformerEngine"),
    ],
)
def test_who_scales_elsewhere(kind: Any, precision: str, who: str) -> None:
    accelerator = cpu()
    _, optimizer = prepared(accelerator)
    accelerator.state.distributed_type, accelerator.state._mixed_precision = kind, precision
    with pytest.raises(UnsupportedError, match=f"{who}.*scales"):
        attach(accelerator, ScalerConfig())
    accelerator.state.distributed_type = DistributedType.NO
    accelerator.state._mixed_precision = "fp16"
    assert type(optimizer) is AcceleratedOptimizer
    assert_untouched(accelerator)
