"""float16 autocast put on a prepared model afterwards, and taken off again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import AutocastKwargs
from attached import cpu, inner_dtype, train
from support import mlp, weights
from torch import Tensor

from accel_scaler import ScalerConfig, UnsupportedError, attach, detach
from accel_scaler.integrations import cpu_float16
from accel_scaler.integrations.autocast import add_autocast, restore_forward


def test_there_and_back() -> None:
    a = cpu()
    model: Any = a.prepare(mlp())
    before = model(torch.ones(2, 8))
    add_autocast(a, model)
    assert inner_dtype(model) is torch.float16
    assert model(torch.ones(2, 8)).dtype is torch.float32
    forward = model.forward
    add_autocast(a, model)
    assert model.forward == forward, "wrapped once"
    restore_forward(a, model)
    restore_forward(a, model)
    assert inner_dtype(model) is torch.float32
    assert not {"forward", "_original_forward"} & model.__dict__.keys()
    assert torch.equal(model(torch.ones(2, 8)), before)


def test_a_forward_set_on_the_instance_comes_back() -> None:
    """A plain function has no ``__func__`` to bind again."""
    a = cpu()
    model: Any = mlp()

    def forward(x: Tensor) -> Tensor:
        return type(model).forward(model, x) + 1

    model.forward = forward
    a.prepare(model)
    add_autocast(a, model)
    assert inner_dtype(model) is torch.float16
    restore_forward(a, model)
    assert model.forward is forward


def test_autocast_settings_are_kept() -> None:
    """``AutocastKwargs(enabled=False)`` switches it off here as in ``prepare``."""
    kwargs = AutocastKwargs(enabled=False)
    a = cpu(kwargs_handlers=[kwargs])
    model = a.prepare(mlp())
    add_autocast(a, model)
    assert inner_dtype(model) is torch.float32


def test_a_compiled_model_is_refused() -> None:
    compiled: Any = torch.compile(mlp(), backend="eager")
    with pytest.raises(UnsupportedError, match=r"attach\(accelerator\) before"):
        add_autocast(cpu(), compiled)
    assert "forward" not in compiled._orig_mod.__dict__


@pytest.mark.parametrize("earlier", ["stock", "detached"])
def test_a_model_that_another_accelerator_has_prepared_gets_it_too(
    monkeypatch: pytest.MonkeyPatch, earlier: str
) -> None:
    """Accelerate hands it back as it is. Beside a model that is prepared for the first time."""
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", lambda: False)
    ends: list[Tensor] = []
    for is_prepared in (False, True):
        model = mlp()
        if is_prepared:
            first = cpu() if earlier == "stock" else attach(cpu(), ScalerConfig())
            first.prepare(model)
            detach(first)
        a = attach(cpu(), ScalerConfig())
        a.prepare(model)
        assert inner_dtype(model) is torch.float16
        optimizer = a.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        ends.append(weights(train(a, model, optimizer)))
        detach(a)
        assert not {"forward", "_original_forward"} & model.__dict__.keys()
    assert torch.equal(*ends)
