"""What the scaler remembers: settings, counters, state dicts, copies."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel_scaler import ConfigError, GradScaler

INF = float("inf")


def window(scaler: Any, optimizer: Any, overflow: bool = False) -> None:
    """One whole iteration; with ``overflow`` a gradient becomes inf."""
    (p, *_) = optimizer.param_groups[0]["params"]
    scaler.scale((p * 2.0).sum()).backward()
    if overflow:
        p.grad.view(-1)[0] = INF
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def fixture(**kwargs: Any) -> tuple[GradScaler, torch.optim.SGD]:
    p = nn.Parameter(torch.zeros(2))
    return GradScaler("cpu", **kwargs), torch.optim.SGD([p], lr=0.5)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"scale": None}, "scale=None"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": "65536"}, "scale='65536'"),
        ({"growth_factor": INF}, "growth_factor=inf"),
        ({"backoff_factor": [0.5]}, "backoff_factor=[0.5]"),
        ({"growth_interval": True}, "growth_interval=True"),
        ({"_growth_tracker": "many"}, "_growth_tracker='many'"),
        ({"_consecutive_skips": "x"}, "_consecutive_skips='x'"),
        ({"scale": 0.0}, "set min_scale"),
    ],
)
def test_a_bad_entry_is_named_and_nothing_is_changed(bad: dict[str, Any], part: str) -> None:
    scaler, optimizer = fixture(growth_interval=7)
    window(scaler, optimizer)
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})
    state = {**before, "scale": 2.0, "growth_factor": 9.0, "_growth_tracker": 5, **bad}
    with pytest.raises(ConfigError) as caught:
        scaler.load_state_dict(state)
    assert part in str(caught.value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("loaded", "expected"), [(1.0, 16.0), (1e6, 1024.0), (64.0, 64.0)])
def test_a_loaded_scale_is_kept_within_the_bounds(
    used: bool, loaded: float, expected: float
) -> None:
    scaler, optimizer = fixture(init_scale=32.0, min_scale=16.0, max_scale=1024.0)
    if used:
        window(scaler, optimizer)
    scaler.load_state_dict({**scaler.state_dict(), "scale": loaded, "_growth_tracker": 3})
    assert scaler.get_scale() == expected
    assert scaler._get_growth_tracker() == 3
    p = torch.ones(1, requires_grad=True)
    assert scaler.scale(p).item() == expected


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_has_everything_and_shares_nothing(clone: Any, used: bool) -> None:
    net = nn.Linear(2, 1)
    scaler, optimizer = fixture(
        init_scale=64.0, min_scale=2.0, max_scale=128.0, hysteresis=2, max_consecutive_skips=9
    )
    scaler.parameter_names.add_module(net)
    if used:
        window(scaler, optimizer)
        window(scaler, optimizer, overflow=True)
    twin = clone(scaler)
    assert type(twin) is GradScaler
    assert twin.state_dict() == scaler.state_dict()
    assert twin.rule == scaler.rule
    assert twin.skips.limit == 9
    assert twin.read_state() == scaler.read_state()
    window(twin, optimizer, overflow=True)
    assert twin.get_scale() == (32.0 if used else 64.0)
    assert scaler.get_scale() == 64.0
    window(scaler, optimizer)
    assert scaler.read_state().consecutive_skips == 0


def test_a_disabled_scaler_keeps_no_state() -> None:
    scaler = GradScaler("cpu", enabled=False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    scaler.load_state_dict({"nonsense": 1})
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False
    assert scaler.get_scale() == 1.0
    assert scaler._get_growth_tracker() == 0


def test_the_lazy_initialisation_that_accelerate_calls() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler._lazy_init_scale_growth_tracker("cpu")
    assert scaler.get_scale() == 8.0
    scaler.scale(torch.ones(1))
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0, "_growth_tracker": 7})
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))  # torch's raises: accelerate #4289
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (4.0, 7)
