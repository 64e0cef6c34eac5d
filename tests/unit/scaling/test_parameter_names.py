"""Names of parameters: their modules', their optimizer's, or a place and a shape."""

from __future__ import annotations

import gc

import torch
from torch import nn

from accel_scaler.scaling.parameter_names import ParameterNames


def test_a_module_names_its_parameters_before_an_optimizer_does() -> None:
    names, net = ParameterNames(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names.add_module(net)
    names.add_module(net)
    assert names.version == 1
    optimizer = torch.optim.SGD([("other", net[1].bias)], lr=1.0)
    assert names.of([net[1].bias, net[0].weight], optimizer) == ["1.bias", "0.weight"]


def test_a_name_of_two_modules_has_the_class_and_of_one_class_a_number_before_it() -> None:
    names, nets = ParameterNames(), [nn.Linear(1, 1), nn.Linear(1, 1, bias=False)]
    for net in nets:
        names.add_module(net)
    assert names.of([nets[0].weight, nets[1].weight, nets[0].bias]) == [
        *("Linear[0].weight", "Linear[1].weight", "bias")
    ]


def test_an_optimizer_names_what_no_module_does_and_a_stranger_has_a_shape() -> None:
    net, names = nn.Linear(3, 2), ParameterNames()
    named = torch.optim.SGD(net.named_parameters(), lr=1.0)
    plain = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=1.0)
    wanted = [net.weight, net.bias]
    assert names.of(wanted, named) == ["weight", "bias"]
    assert names.of(wanted, plain) == [
        "parameter 0 of group 0, shape (2, 3)",
        "parameter 0 of group 1, shape (2,)",
    ]
    assert names.of(wanted[:1]) == ["a parameter of shape (2, 3)"]
    assert names.of([]) == []


def test_a_module_is_held_weakly() -> None:
    names, net = ParameterNames(), nn.Linear(3, 2)
    weight = net.weight
    names.add_module(net)
    del net
    gc.collect()
    assert names.of([weight]) == ["a parameter of shape (2, 3)"]
