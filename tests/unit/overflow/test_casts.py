"""Tensors in containers, up and down."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from accel_scaler.overflow.casts import FULL, LOW, first_dtype, lowered, raised

Pair = namedtuple("Pair", "one two")
HALF = torch.ones(2, dtype=torch.float16)


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in flat(item)]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in flat(item)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in flat(getattr(value, f.name))]
    return []


@dataclasses.dataclass
class Data:
    hidden: Tensor
    name: str = "x"
    made: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: (t, 1),
        lambda t: [t, None],
        lambda t: {"a": t, "b": "c"},
        lambda t: Pair(1, t),
        lambda t: OrderedDict(a=t),
        lambda t: defaultdict(list, a=t),
        lambda t: UserDict(a=t),
        lambda t: MappingProxyType({"a": t}),
        lambda t: Data(t),
        lambda t: Frozen(t),
        lambda t: BaseModelOutput(last_hidden_state=t, hidden_states=(t, t)),
        lambda t: [({"a": (Pair(t, [t]),)},)],
    ],
)
def test_a_container_is_made_anew_only_where_something_changes(make: Any) -> None:
    value = make(HALF)
    wide = raised(value)
    assert type(wide) is type(value)
    assert [t.dtype for t in flat(wide)] == [torch.float32] * len(flat(value))
    assert all(t is HALF for t in flat(value)), "what came in is as it was"
    assert raised(wide) is wide
    assert first_dtype(value, LOW) is torch.float16
    assert first_dtype(wide, LOW) is None
    assert first_dtype(wide, FULL) is torch.float32
    assert first_dtype(value, FULL) is None
    back = lowered(wide, torch.float16)
    assert type(back) is type(value)
    assert [t.dtype for t in flat(back)] == [torch.float16] * len(flat(value))
    if isinstance(wide, BaseModelOutput):
        assert wide.last_hidden_state is wide["last_hidden_state"]
        assert wide.hidden_states is wide["hidden_states"]


def test_other_tensors_are_passed_as_they_are() -> None:
    value = (torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64))
    assert raised(value) is value
    low = lowered(value, torch.bfloat16)
    assert [t.dtype for t in low] == [torch.bfloat16, torch.float64, torch.int64]
    assert raised(Data) is Data


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_beyond_the_range_is_clamped_but_not_what_is_infinite(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, most, 3e38 * 1.13, -3.4e38, inf, -inf, nan], requires_grad=True)
    low = lowered(x, dtype)
    expected = torch.tensor([1.0, most, most, -most, inf, -inf, nan], dtype=dtype)
    assert torch.equal(
        low.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0),
        expected.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0),
    )
    low.float().backward(torch.ones(7))
    assert x.grad is not None
    assert x.grad[:4].tolist() == [1, 1, 0, 0]
    assert lowered(torch.tensor(65519.0), torch.float16).item() == 65504


def test_containers_that_hold_themselves_end() -> None:
    known: dict[str, Any] = {"a": HALF}
    known["self"] = known
    assert raised(known)["a"].dtype is torch.float32
    data = Data(torch.ones(1))
    data.made = data
    assert raised(data) is data
