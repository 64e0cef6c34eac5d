"""``offloaded``: what it refuses, and when; what the class is called and takes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from accel_scaler import AccelScalerError, ConfigError, UnsupportedError, offloaded


class Own(torch.optim.AdamW):
    """A subclass may step as it likes."""


WRONG: dict[str, tuple[Any, type[AccelScalerError], str]] = {
    "number": (
        5,
        ConfigError,
        "got an instance of int, expected a class such as torch.optim.AdamW",
    ),
    "list": ([torch.optim.AdamW], ConfigError, "got an instance of list, expected a class"),
    "module": (nn.Linear, ConfigError, "Linear.*, expected a class"),
    "instance": (
        torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
        ConfigError,
        "got an instance of SGD, expected",
    ),
    "scheduler": (torch.optim.lr_scheduler.StepLR, ConfigError, "StepLR.*, expected a class"),
    "subclass": (Own, UnsupportedError, r"test_offloaded_class\.Own, expected a class of torch"),
    "closures": (torch.optim.LBFGS, UnsupportedError, r"LBFGS, expected.*AdamW"),
    "matrices": (torch.optim.Adafactor, UnsupportedError, r"Adafactor, expected.*AdamW"),
    "sparse": (torch.optim.SparseAdam, UnsupportedError, r"SparseAdam, expected.*AdamW"),
    "base": (torch.optim.Optimizer, UnsupportedError, r"Optimizer, expected.*AdamW"),
    "twice": (offloaded(torch.optim.AdamW), UnsupportedError, r"OffloadedAdamW, expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_class_is_one_line_before_anything_is_made(case: str) -> None:
    given, kind, text = WRONG[case]
    with pytest.raises(kind, match=text) as caught:
        offloaded(given)
    assert "\n" not in str(caught.value)


def test_a_wrong_model_or_budget_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"as model, expected a torch\.nn\.Module.*parameters"):
        offloaded(torch.optim.AdamW, nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="offload_budget: got '6 lbs', expected"):
        offloaded(torch.optim.AdamW, offload_budget="6 lbs")
    with pytest.raises(ConfigError, match="Linear has none of the optimizer's 1 parameters"):
        offloaded(torch.optim.AdamW, nn.Linear(2, 2))([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("argument", ["capturable", "differentiable"])
def test_an_argument_that_cannot_stream_is_refused_when_it_is_made(argument: str) -> None:
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(UnsupportedError, match=f"AdamW has {argument}=True, expected False"):
        offloaded(torch.optim.AdamW)([p], **{argument: True})
    offloaded(torch.optim.AdamW)([p])


def test_torchs_own_errors_are_torchs() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        offloaded(torch.optim.AdamW)([nn.Parameter(torch.zeros(1))], lr=-1.0)


def test_the_class_is_the_one_it_was_made_of_with_its_arguments() -> None:
    made = offloaded(torch.optim.AdamW)
    assert issubclass(made, torch.optim.AdamW)
    assert made.__name__ == "OffloadedAdamW"
    assert inspect.signature(made) == inspect.signature(torch.optim.AdamW)
    optimizer = made([nn.Parameter(torch.zeros(1))], lr=0.25)
    assert optimizer.defaults["lr"] == 0.25
    assert repr(optimizer).startswith("OffloadedAdamW (\nParameter Group 0")
    assert "lr: 0.25" in repr(optimizer)


def test_a_copy_is_refused() -> None:
    optimizer = offloaded(torch.optim.AdamW)([nn.Parameter(torch.zeros(1))])
    with pytest.raises(UnsupportedError, match=r"OffloadedAdamW is not copied.*state_dict\(\)"):
        copy.deepcopy(optimizer)
