"""Numbers for parameters: stable while they live, started over when one is gone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from accel_scaler.scaling.parameter_names import ParameterNames
from accel_scaler.telemetry.name_table import NameTable


def table_of(*models: nn.Module) -> NameTable:
    names = ParameterNames()
    for model in models:
        names.add_module(model)
    return NameTable(names)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def floats(values: tuple[float, ...] | None) -> list[float]:
    assert values is not None
    return list(values)


def optimizer_of(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params), lr=1.0)


def numbers(table: NameTable, params: Sequence[Tensor]) -> list[int]:
    return table.numbers_of(params, optimizer_of(dict.fromkeys(params)))


def test_each_parameter_gets_the_next_number_once() -> None:
    model = chain()
    table, params = table_of(model), list(model.parameters())
    assert numbers(table, params[2:]) == [0, 1]
    assert numbers(table, params) == [2, 3, 0, 1]
    assert numbers(table, [params[3], params[3]]) == [1, 1]
    assert table.names.names == ("1.weight", "1.bias", "0.weight", "0.bias")


def test_places_are_the_models_own_order_and_what_no_model_knows_comes_last() -> None:
    one, two, own = chain(), nn.Linear(1, 1), nn.Parameter(torch.zeros(5))
    table = table_of(one, two)
    numbers(table, [own, *two.parameters(), *one.parameters()])
    by_place = [name for _, name in sorted(zip(table.names.places, table.names.names, strict=True))]
    assert by_place == [
        *(name for name, _ in one.named_parameters()),
        *("weight", "bias", "parameter 0 of group 0, shape (5,)"),
    ]


def test_a_parameter_at_the_address_of_one_that_is_gone_is_another() -> None:
    """Python gives a freed ``id`` away again; a table by id alone would keep the old name."""
    keep, table = [], table_of()
    for size in range(1, 200):
        p = nn.Parameter(torch.zeros(size))
        keep.append(id(p))
        (number,) = numbers(table, [p])
        assert table.names.names[number] == f"parameter 0 of group 0, shape ({size},)"
        del p
    assert len(set(keep)) < len(keep)  # else this has shown nothing


def test_a_model_that_is_known_later_renames_its_parameters() -> None:
    model, names = chain(), ParameterNames()
    table = NameTable(names)
    numbers(table, list(model.parameters()))
    assert table.names.names[0] == "parameter 0 of group 0, shape (3, 2)"
    names.add_module(model)
    numbers(table, list(model.parameters()))
    assert table.names.names == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_norms_stand_at_their_numbers_and_nan_where_there_is_none() -> None:
    model = chain()
    table, params = table_of(model), list(model.parameters())
    optimizer = optimizer_of(params)
    all_of = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert floats(table.norms_by_number([(params, None, all_of)], optimizer)) == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    some = floats(table.norms_by_number([(params[1:3], None, torch.tensor([5.0, 6.0]))], optimizer))
    assert some[1:3] == [5.0, 6.0]
    assert math.isnan(some[0])
    assert math.isnan(some[3])
    one, other = torch.tensor([7.0]), torch.tensor([8.0])
    two = [(params[:1], None, one), (params[3:], None, other)]
    found = floats(table.norms_by_number(two, optimizer))
    assert (found[0], found[3]) == (7.0, 8.0)
    assert math.isnan(found[1])
    backwards = floats(table.norms_by_number([(params[::-1], None, all_of)], optimizer))
    assert backwards == [4.0, 3.0, 2.0, 1.0]
