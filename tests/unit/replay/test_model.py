"""The user's model is found, called and made to be that of the file, or refused in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_scaler import ConfigError
from accel_scaler.overflow_finder import PostMortem
from accel_scaler.replay.model import adopt, make_model, read_weights


def file_of(model: nn.Module, weights: bool = True) -> PostMortem:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {n: (str(t.dtype), tuple(t.shape), t.requires_grad) for n, t in own.items()}
    kept = {n: t.detach().clone() for n, t in own.items()} if weights else None
    training = {n: m.training for n, m in model.named_modules()}
    return PostMortem({}, "a.Model", training, shapes, kept, (), [], [], 1, {}, ())


def model_of(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


GOOD = "import torch\ndef make():\n    return torch.nn.Linear(2, 3)\nnumber = 3\n"


def test_a_function_in_a_file_and_in_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_model_file.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    for where in ("some_model_file.py:make", "some_model_file:make"):
        assert isinstance(make_model(where), nn.Linear)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("make", "expected package.module:function"),
        ("m.py:", "expected package.module:function"),
        ("none.py:make", "no such file"),
        ("none_such_module:make", "cannot be imported"),
        ("m.py:other", "has no function other"),
        ("m.py:number", "has no function number"),
        ("m.py:nothing", "returned a NoneType"),
        ("m.py:fails", "raised KeyError"),
        ("m.py:takes", "raised TypeError"),
        ("exits.py:make", "cannot be imported"),
        ("wrong.py:make", "cannot be imported"),
    ],
)
def test_what_is_no_function_of_a_model_is_refused(
    where: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = "def nothing(): pass\ndef fails(): {}['a']\ndef takes(a): return 1\n"
    (tmp_path / "m.py").write_text(GOOD + more)
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "wrong.py").write_text("def (")
    with pytest.raises(ConfigError, match=says):
        make_model(where)


def test_weights_modes_and_what_trains_are_those_of_the_file() -> None:
    was = model_of(4, 3, 2)
    was[0].requires_grad_(False)
    was[1].eval()
    was[0].weight.data = was[0].weight.data.t().contiguous().t()
    model = model_of(4, 3, 2)
    adopt(model, file_of(was), None)
    for mine, theirs in zip(model.parameters(), was.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
        assert mine.stride() == theirs.stride()
    assert [m.training for m in model.modules()] == [m.training for m in was.modules()]


def test_another_model_is_refused_by_what_differs() -> None:
    file = file_of(model_of(4, 3, 2))
    for model, says in (
        (model_of(4, 5, 2), r"0.weight is float32 \[5, 4\], in the file float32 \[3, 4\]"),
        (model_of(4, 3), r"it has no 1.weight \(but 0.weight\)"),
        (model_of(4, 3, 2, 1), "2.weight is not in the file"),
        (model_of(4, 3, 2).half(), "0.weight is float16"),
    ):
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ConfigError, match=says):
            adopt(model, file, None)
        assert all(map(torch.equal, before, model.parameters()))


def test_other_weights_from_a_file_or_a_folder(tmp_path: Path) -> None:
    was, wanted = model_of(4, 3, 2), model_of(4, 3, 2)
    state = wanted.state_dict()
    torch.save(state, tmp_path / "w.pt")
    (tmp_path / "folder").mkdir()
    for number, (name, value) in enumerate(state.items()):
        save_file({name: value}, tmp_path / "folder" / f"model-{number}.safetensors")
    for where in ("w.pt", "folder"):
        model = model_of(4, 3, 2)
        adopt(model, file_of(was, weights=False), read_weights(str(tmp_path / where)))
        assert all(map(torch.equal, model.parameters(), wanted.parameters()))
    with pytest.raises(ConfigError, match=r"they lack 0.weight"):
        adopt(model_of(4, 3, 2), file_of(was), {"0.bias": state["0.bias"]})
    with pytest.raises(ConfigError, match=r"0.weight has shape \(3, 3\)"):
        adopt(model_of(4, 3, 2), file_of(was), {**state, "0.weight": torch.zeros(3, 3)})
    (tmp_path / "bad.pt").write_bytes(b"PK no zip")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    for name in ("bad.pt", "bad.safetensors", "list.pt", "none.pt", "empty"):
        with pytest.raises(ConfigError, match="--weights"):
            read_weights(str(tmp_path / name))
