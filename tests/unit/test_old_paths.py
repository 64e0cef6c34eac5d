"""What was pickled before the package had folders loads, and trains on.

``pickles/before_folders.pkl`` holds ``{name: pickle}``, written by the flat package: a scaler after
an overflow, settings, accelerators with what they prepared, histories, an asynchronous optimizer.
"""

from __future__ import annotations

import pickle
import pickletools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import HELPERS

import accel_scaler
from accel_scaler import (
    AsyncOptimizer,
    ConfigError,
    GradScaler,
    ScaledAccelerator,
    ScalerConfig,
    attach,
)
from accel_scaler.old_paths import OLD

FILE = HELPERS / "pickles" / "before_folders.pkl"
HELD: dict[str, bytes] = pickle.loads(FILE.read_bytes())


def load(name: str) -> Any:
    return pickle.loads(HELD[name])


def own_paths(text: bytes) -> set[str]:
    """Texts of a pickle that name a module of ours."""
    texts = {str(arg) for _, arg, _ in pickletools.genops(text) if isinstance(arg, str)}
    return {said for said in texts if said.startswith("accel_scaler.")}


def test_the_pickles_name_modules_that_are_gone_and_every_old_path_is_in_one() -> None:
    named = {path for text in HELD.values() for path in own_paths(text)}
    assert named >= OLD.keys()
    folder = Path(accel_scaler.__file__).parent
    for path in OLD:
        assert not (folder / f"{path.partition('.')[2]}.py").exists(), f"{path} is a module"
        assert list(vars(sys.modules[path])) != []


def test_settings_and_errors() -> None:
    assert load("config") == ScalerConfig(step_mode="overlap", init_scale=1024.0)
    assert (type(load("error")), str(load("error"))) == (ConfigError, "a message")


def test_a_scaler_goes_on_with_its_scale_and_its_run_of_skips() -> None:
    scaler = load("scaler")
    assert type(scaler) is GradScaler
    assert scaler.get_scale() == 2.0**15
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for left in range(4, -1, -1):
        scaler.scale(model(torch.full((1, 4), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        if left:
            scaler.update()
        optimizer.zero_grad()
    with pytest.raises(accel_scaler.OverflowStreakError, match="65536 -> 32768"):
        scaler.update()


def plain(steps: int) -> torch.Tensor:
    """The same training in plain torch: ones in, the sum out."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("name", ["sync", "overlap", "made directly"])
def test_an_accelerator_trains_on_with_what_it_prepared(name: str) -> None:
    accelerator = load(f"accelerator {name}")
    assert (type(accelerator) is ScaledAccelerator) == (name == "made directly")
    assert type(accelerator.scaler) is GradScaler
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    assert torch.equal(model.weight, plain(2))
    # Under a plain accelerator: a copy is not attached, and trains as stock does.
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, plain(3))
    assert type(attach(accelerator, ScalerConfig())) is ScaledAccelerator


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_prepared_optimizer_and_a_history(mode: str) -> None:
    optimizer = load(f"optimizer {mode}")
    assert isinstance(optimizer, accel_scaler.integrations.optimizer.ScaledOptimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0], plain(2))
    history = load(f"history {mode}")
    assert isinstance(history, accel_scaler.telemetry.History)
    assert (history.boundaries, len(history.records)) == (2, 2)


def test_an_asynchronous_optimizer_trains_on() -> None:
    with load("asynchronous") as optimizer:
        assert type(optimizer) is AsyncOptimizer
        model = optimizer.model
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(model.weight, plain(3))
