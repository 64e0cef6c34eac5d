"""Globs on the names of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from accel_scaler import ConfigError
from accel_scaler.overflow.module_names import match, modules_by_name, refuse_unmatched


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
        return self.emb(x)


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (["h.1.wo"], ["h.1.wo"]),
        (["*.wo"], ["h.0.wo", "h.1.wo", "h.2.wo", "names.a.wo"]),
        (["h.[02]"], ["h.0", "h.2"]),
        (["names", "emb"], ["emb"]),
        (["emb", "e*"], ["emb"]),
        (["WO", "", "wo"], []),
        ([], []),
        (["*"], [n for n in modules_by_name(Net()) if n not in ("", "h", "names")]),
    ],
)
def test_a_glob_names_modules_in_the_models_order(globs: list[str], expected: list[str]) -> None:
    assert match(Net(), globs) == expected


def test_names_are_those_without_wrappers() -> None:
    model = Net()
    plain = {name: id(module) for name, module in modules_by_name(model).items()}
    assert list(plain) == [name for name, _ in model.named_modules()]
    wrapped: Any = checkpoint_wrapper(model.h[1])
    model.h[1] = torch.compile(wrapped, backend="eager")
    compiled: Any = torch.compile(model, backend="eager")
    for each in (model, compiled, nn.DataParallel(model)):
        assert {name: id(module) for name, module in modules_by_name(each).items()} == plain
    assert match(compiled, ["h.1.wo"]) == ["h.1.wo"]


def test_what_matches_nothing_is_refused_with_the_nearest_names() -> None:
    refuse_unmatched([nn.Linear(1, 1), Net()], ["*.wo", "emb"])
    refuse_unmatched([], [])
    for models, globs, why in (
        ([Net()], ["emb", "h.1.w0"], r"'h\.1\.w0' matches no module.*'h\.1\.wo'"),
        ([Net()], ["*.wot"], r"'\*\.wot' .*\.wo'"),
        ([Net()], ["zzzzzz"], "no name is near it"),
        ([], ["*"], "no model is prepared"),
    ):
        with pytest.raises(ConfigError, match=why):
            refuse_unmatched(models, globs)
