"""Globs on the names of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from accel_scaler import ConfigError
from accel_scaler.overflow.names import match, named, refuse_unmatched


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.wo(self.wi(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.names = nn.ModuleDict({"a": Block()})

    def forward(self, x: Any) -> Any:
        x = self.emb(x)
        for block in self.h:
            x = block(x)
        return self.names["a"](x)


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (["h.1.wo"], ["h.1.wo"]),
        (["*.wo"], ["h.0.wo", "h.1.wo", "h.2.wo", "names.a.wo"]),
        (["h.[02]"], ["h.0", "h.2"]),
        (["h"], ["h.0", "h.1", "h.2"]),
        (["names", "emb"], ["emb", "names.a"]),
        (["emb", "e*"], ["emb"]),
        (["WO", "", "wo"], []),
        (["*"], [n for n in named(Net()) if n not in ("", "h", "names")]),
    ],
)
def test_a_glob_names_modules_in_the_models_order(globs: list[str], expected: list[str]) -> None:
    assert match(Net(), globs) == expected


def test_names_are_those_of_the_model_within() -> None:
    model = Net()
    plain = {name: id(module) for name, module in named(model).items()}
    assert list(plain) == [name for name, _ in model.named_modules()]
    compiled: Any = torch.compile(model, backend="eager")
    assert {name: id(module) for name, module in named(compiled).items()} == plain
    parallel = nn.DataParallel(model)
    assert {name: id(module) for name, module in named(parallel).items()} == plain
    wrapped: Any = checkpoint_wrapper(model.h[1])
    model.h[1] = torch.compile(wrapped, backend="eager")
    assert {name: id(module) for name, module in named(model).items()} == plain
    assert match(compiled, ["h.1.wo"]) == ["h.1.wo"]


def test_a_shared_module_is_meant_once_whichever_name_is_given() -> None:
    model = Net()
    model.h[2] = model.h[0]
    assert match(model, ["h.2"]) == ["h.2"]
    assert match(model, ["h.*.wi"]) == ["h.0.wi", "h.1.wi"]


def test_a_module_that_holds_its_own_parent_is_walked_once() -> None:
    model = Net()
    model.h[0].parent = model
    assert match(model, ["*.wo"]) == ["h.0.wo", "h.1.wo", "h.2.wo", "names.a.wo"]


def test_what_matches_nothing_is_refused_with_the_nearest_names() -> None:
    refuse_unmatched([Net()], ["*.wo", "emb"])
    refuse_unmatched([nn.Linear(1, 1), Net()], ["*.wo"])
    with pytest.raises(ConfigError, match=r"'h\.1\.w0' matches no module.*'h\.1\.wo'"):
        refuse_unmatched([Net()], ["emb", "h.1.w0"])
    with pytest.raises(ConfigError, match=r"'\*\.wot' .*\.wo'"):
        refuse_unmatched([Net()], ["*.wot"])
    with pytest.raises(ConfigError, match="no model is prepared"):
        refuse_unmatched([], ["*"])
    with pytest.raises(ConfigError, match="no name is near it"):
        refuse_unmatched([Net()], ["zzzzzz"])


def test_nothing_asked_is_nothing_refused() -> None:
    refuse_unmatched([], [])
    assert match(Net(), []) == []
