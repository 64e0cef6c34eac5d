"""What earlier versions have pickled loads, and trains on.

Each file of ``pickles`` holds ``{name: pickle}``, written by the flat package, and by the first one
with folders: a scaler after an overflow, settings, accelerators with what they prepared, histories,
an asynchronous optimizer.
"""

from __future__ import annotations

import importlib
import os
import pickle
import pickletools
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import HELPERS, ROOT

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

HELD: dict[str, dict[str, bytes]] = {
    path.stem: pickle.loads(path.read_bytes())
    for path in sorted((HELPERS / "pickles").glob("*.pkl"))
}


@pytest.fixture(params=HELD)
def load(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    return lambda name: pickle.loads(HELD[request.param][name])


def own_paths(text: bytes) -> set[str]:
    """Texts of a pickle that name a module of ours."""
    texts = {str(arg) for _, arg, _ in pickletools.genops(text) if isinstance(arg, str)}
    return {said for said in texts if said.startswith("accel_scaler.")}


def test_every_old_path_is_in_a_pickle() -> None:
    named = {path for held in HELD.values() for text in held.values() for path in own_paths(text)}
    assert named >= OLD.keys()
    for path, names in OLD.items():
        for name, home in names.items():
            assert getattr(importlib.import_module(path), name) is pkgutil.resolve_name(home)
        with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'Nobody'"):
            getattr(importlib.import_module(path), "Nobody".strip())


@pytest.mark.process
@pytest.mark.parametrize("name", ["scaler", "accelerator sync", "history sync"])
def test_a_pickle_may_be_the_first_that_asks_for_the_package(name: str, tmp_path: Path) -> None:
    for held in HELD.values():
        (tmp_path / "p.pkl").write_bytes(held[name])
        code = "import pickle, sys; print(type(pickle.load(open('p.pkl', 'rb'))).__name__)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.stdout.split() == [type(pickle.loads(held[name])).__name__]


def test_settings_and_errors(load: Callable[[str], Any]) -> None:
    assert load("config") == ScalerConfig(step_mode="overlap", init_scale=1024.0)
    assert (type(load("error")), str(load("error"))) == (ConfigError, "a message")


def test_a_scaler_goes_on_with_its_scale_and_its_run_of_skips(load: Callable[[str], Any]) -> None:
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
def test_an_accelerator_trains_on_with_what_it_prepared(
    name: str, load: Callable[[str], Any]
) -> None:
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
def test_a_prepared_optimizer_and_a_history(mode: str, load: Callable[[str], Any]) -> None:
    optimizer = load(f"optimizer {mode}")
    assert isinstance(optimizer, accel_scaler.integrations.optimizer.ScaledOptimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0], plain(2))
    history = load(f"history {mode}")
    assert (history.boundaries, len(history.records)) == (2, 2)
    first, last = history.records
    assert (last.index, last.lr, last.healed, history.healed) == (1, (0.1,), (), ())
    history.add(replace(last, index=2))
    assert "scaler: 3 windows, 0 skipped" in history.summary()
    assert first != last


def test_an_asynchronous_optimizer_trains_on(load: Callable[[str], Any]) -> None:
    with load("asynchronous") as optimizer:
        assert type(optimizer) is AsyncOptimizer
        model = optimizer.model
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(model.weight, plain(3))
