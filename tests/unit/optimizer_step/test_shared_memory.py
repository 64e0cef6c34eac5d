"""Which tensors have memory in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_scaler import AsyncOptimizer, UnsupportedError, attach, detach
from accel_scaler.optimizer_step.supported_optimizers import overlapping


def test_groups_by_memory() -> None:
    flat, other = torch.zeros(100), torch.zeros(10)
    tensors = [
        flat[:10],
        other,
        flat[50:60],
        flat[:10],
        flat[5:15].view(2, 5).t(),
        other.view(torch.int32),
        torch.zeros(0),
        flat[:0],
        flat[60:],
    ]
    assert overlapping(tensors) == [[0, 3, 4], [1, 5]]


def test_interleaved_views_count_as_shared() -> None:
    matrix = torch.zeros(4, 6)
    assert overlapping([matrix[:, :3], matrix[:, 3:]]) == [[0, 1]]
    assert overlapping([matrix[:2], matrix[2:]]) == []


def test_what_has_no_memory_of_its_own_is_left_out() -> None:
    index, values = torch.tensor([[0, 1]]), torch.ones(2)
    sparse = torch.sparse_coo_tensor(index, values, (3,))
    assert overlapping([sparse, sparse, torch.empty(3, device="meta")]) == []


def transposed() -> tuple[nn.Module, list[nn.Parameter]]:
    """Two parameters over one memory."""
    model = nn.Module()
    model.encoder = nn.Parameter(torch.ones(3, 2))
    model.decoder = nn.Parameter(model.encoder.detach().t())
    return model, [model.encoder, model.decoder]


def with_a_view() -> tuple[nn.Module, list[nn.Parameter]]:
    """A buffer in the memory of a parameter."""
    model = nn.Module()
    model.encoder = nn.Parameter(torch.ones(3, 2))
    model.register_buffer("decoder", model.encoder.detach()[:1])
    return model, [model.encoder]


@pytest.mark.parametrize("make", [transposed, with_a_view])
def test_one_memory_of_two_tensors_is_stepped_as_in_sync(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In overlap a read of the other tensor would not wait."""

    def stepped(is_attached: bool) -> nn.Module:
        model, params = make()
        sgd = torch.optim.SGD(params, lr=0.5)
        params[0].grad = torch.ones(3, 2)
        if is_attached:
            accelerator = attach(Accelerator(cpu=True), step_mode="overlap")
            accelerator.prepare(model, sgd)[1].step()
            detach(accelerator)
        else:
            with AsyncOptimizer(sgd, model) as optimizer:
                optimizer.step()
        return model

    for is_attached in (True, False):
        model = stepped(is_attached)
        assert model.encoder.tolist() == [[0.5, 0.5]] * 3
        assert model.decoder.flatten()[0] == 0.5
    assert [message.count("in the memory") for message in caplog.messages] == [1, 1]


def test_two_parameters_that_would_have_a_master_each_are_refused() -> None:
    model, _ = transposed()
    params = [nn.Parameter(model.encoder.detach().half())]
    params.append(nn.Parameter(params[0].detach().t()))
    with pytest.raises(UnsupportedError, match="share memory"):
        AsyncOptimizer(torch.optim.SGD(params, lr=0.5), step_mode="sync")
