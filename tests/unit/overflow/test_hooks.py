"""Tensors in what modules are given and return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from accel_scaler.overflow.fp32_modules import cast_down
from accel_scaler.overflow.hooks import map_tensors, tensors_in

Pair = namedtuple("Pair", "one two")
HALF = torch.ones(2, dtype=torch.float16)


@dataclasses.dataclass
class Data:
    hidden: Tensor


class Output(OrderedDict[str, Any]):
    """As one of transformers that pytree does not know yet."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (HALF, 1),
        ((HALF, 1), 1),
        ([None, HALF], 1),
        ({"a": HALF, "b": "c"}, 1),
        (Pair(1, HALF), 1),
        (defaultdict(list, a=HALF), 1),
        (UserDict(a=HALF), 1),
        (Output(a=HALF), 1),
        (BaseModelOutput(last_hidden_state=HALF, hidden_states=(HALF, HALF)), 3),  # type: ignore[arg-type]
        ([({"a": (Pair(HALF, [HALF]),)},)], 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_is_copied_with_other_tensors(value: Any, count: int) -> None:
    wide = map_tensors(value, Tensor.float)
    assert type(wide) is type(value)
    assert [t.dtype for t in tensors_in(wide)] == [torch.float32] * count
    assert all(t is HALF for t in tensors_in(value)), "what came in is as it was"
    if isinstance(wide, BaseModelOutput):
        assert wide.last_hidden_state is wide["last_hidden_state"]
    if isinstance(wide, Output):
        assert wide.a is wide["a"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [Data(HALF), MappingProxyType({"a": HALF}), "text", None])
def test_other_objects_are_passed_as_they_are(value: Any) -> None:
    assert map_tensors(value, Tensor.float) is value
    assert tensors_in(value) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_values_are_clamped_when_they_are_cast_down(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, most, 3e38 * 1.13, -3.4e38, inf, -inf, nan], requires_grad=True)
    low = cast_down((x, torch.ones(1, dtype=torch.float64)), dtype)
    assert low[1].dtype is torch.float64
    expected = torch.tensor([1.0, most, most, -most, inf, -inf, nan], dtype=dtype)
    assert torch.equal(low[0].nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
    low[0].float().backward(torch.ones(7))
    assert x.grad is not None
    assert x.grad[:4].tolist() == [1, 1, 0, 0]
    assert cast_down(torch.tensor(65519.0), torch.float16).item() == 65504
