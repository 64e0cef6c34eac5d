"""Names for tensors that overflow, and the error that ends a run of skips."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from torch import nn

from accel_scaler import OverflowStreakError
from accel_scaler.scaling.parameter_names import MOST_NAMES, Culprits


def broken(*shape: int) -> nn.Parameter:
    """A parameter whose gradient holds an inf."""
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.full(shape, float("inf"))
    return p


def test_a_known_module_names_its_parameters() -> None:
    culprits, net = Culprits(1), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    culprits.know(net)
    culprits.know(net)
    assert culprits.names([net[1].bias, net[0].weight]) == ["1.bias", "0.weight"]


def test_an_optimizer_names_what_no_module_does() -> None:
    net = nn.Linear(3, 2)
    named = torch.optim.SGD(net.named_parameters(), lr=1.0)
    plain = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=1.0)
    wanted = [net.weight, net.bias]
    assert Culprits(1).names(wanted, named) == ["weight", "bias"]
    assert Culprits(1).names(wanted, plain) == [
        "parameter 0 of group 0, shape (2, 3)",
        "parameter 0 of group 1, shape (2,)",
    ]


def test_the_modules_name_comes_first_and_a_stranger_has_a_shape() -> None:
    culprits, net = Culprits(1), nn.Linear(3, 2)
    culprits.know(net)
    optimizer = torch.optim.SGD([("other", net.weight)], lr=1.0)
    assert culprits.names([net.weight], optimizer) == ["weight"]
    assert culprits.names([broken(4, 5)]) == ["a parameter of shape (4, 5)"]
    assert culprits.names([]) == []


def test_a_module_is_held_weakly() -> None:
    culprits, net = Culprits(1), nn.Linear(3, 2)
    weight = net.weight
    culprits.know(net)
    del net
    gc.collect()
    assert culprits.names([weight]) == ["a parameter of shape (2, 3)"]


def test_only_the_overflow_that_ends_the_run_reads_the_gradients() -> None:
    culprits, p = Culprits(2), broken(3)
    optimizer = torch.optim.SGD([("w", p)], lr=1.0)
    culprits.note(optimizer, 1)
    assert culprits.seen == {}
    culprits.note(optimizer, 2)
    assert culprits.seen == {"w": 1}
    unlimited = Culprits(None)
    unlimited.note(optimizer, 99)
    assert unlimited.seen == {}


def test_a_parameter_alone_can_be_looked_at() -> None:
    culprits, fine = Culprits(1), nn.Parameter(torch.zeros(2))
    fine.grad = torch.zeros(2)
    culprits.note(fine, 1)
    culprits.note(broken(2), 1)
    assert culprits.seen == {"a parameter of shape (2,)": 1}


def test_finite_gradients_and_missing_ones_are_innocent() -> None:
    culprits = Culprits(1)
    fine, none, bad = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), broken(2)
    fine.grad = torch.ones(2)
    culprits.note(torch.optim.SGD([("fine", fine), ("none", none), ("bad", bad)], lr=1.0), 1)
    assert culprits.seen == {"bad": 1}


def test_nothing_is_raised_up_to_the_limit() -> None:
    Culprits(None).raise_if_over(10**6, lambda: 1.0)
    Culprits(3).raise_if_over(3, lambda: 1.0)
    with pytest.raises(OverflowStreakError):
        Culprits(3).raise_if_over(4, lambda: 1.0)


def test_the_error_names_the_worst_first_and_counts_the_rest() -> None:
    culprits = Culprits(1)
    culprits.count(f"layer{i}" for i in range(MOST_NAMES + 2))
    culprits.count(["layer3"])
    with pytest.raises(OverflowStreakError) as caught:
        culprits.raise_if_over(2, lambda: 0.125)
    text = str(caught.value)
    assert "Non-finite gradients in: layer3, layer0, layer1, layer2, layer4 and 2 more." in text
    assert "2 windows in a row overflowed, max_consecutive_skips=1 allows 1" in text
    assert "Scale: 0.125. " in text
    assert culprits.seen == {}


def test_the_error_without_names() -> None:
    with pytest.raises(OverflowStreakError, match="Non-finite gradients in: unknown tensors"):
        Culprits(1).raise_if_over(2, lambda: 1.0)


def test_a_finite_window_forgets_the_offenders() -> None:
    culprits = Culprits(1)
    culprits.count(["w"])
    culprits.raise_if_over(1, lambda: 1.0)
    assert culprits.seen == {"w": 1}
    culprits.raise_if_over(0, lambda: 1.0)
    assert culprits.seen == {}


def test_pickling_keeps_the_counts_and_leaves_the_modules_behind() -> None:
    culprits, net = Culprits(4), nn.Linear(1, 1)
    culprits.know(net)
    culprits.count(["w"])
    again = pickle.loads(pickle.dumps(culprits))
    assert (again.limit, again.seen) == (4, {"w": 1})
    assert again.names([net.bias]) == ["a parameter of shape (1,)"]
    assert culprits.names([net.bias]) == ["bias"]
