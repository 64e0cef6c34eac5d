"""A file of ``save_overflow``: what goes in comes out; what is made to harm is refused."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overflowing
import pytest
import torch
from support import reset
from torch import Tensor, nn

from accel_scaler import ConfigError, cli
from accel_scaler.errors import UnsupportedError
from accel_scaler.overflow_finder import (
    WindowRecording,
    capture,
    post_mortem,
    read,
    run_again,
    write,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

INF = float("inf")


class Model(nn.Module):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(x) * INF


def window_of(model: nn.Module, *args: Any, **kwargs: Any) -> WindowRecording:
    """Recorded, with one backward."""
    recording = WindowRecording()
    recording.watch(model, model)
    loss = model(*args, **kwargs).sum()
    recording.note_backward(loss)
    loss.backward()
    return recording


def saved(path: Path, *args: Any, **kwargs: Any) -> Any:
    """Captured, written and read again."""
    model = Model()  # a recording holds it weakly
    recording = window_of(model, *args, **kwargs)
    write(path, capture(recording, run_again(recording), {"scale": 2.0}))
    return read(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a run."""
    return overflowing.file_of_a_run(tmp_path_factory.mktemp("run"))


def test_arguments_come_out_as_they_went_in(tmp_path: Path) -> None:
    wide = torch.arange(64.0).view(8, 8)
    x = wide[::2, :4].t()[:4, :4].requires_grad_()
    more = [None, True, 1 << 70, -INF, "text", torch.float16, (1, [2.5]), torch.Size([2, 3])]
    file = saved(tmp_path / "f.pt", x, more, deep={"a": {1: x}}, ordered=OrderedDict(b=x))
    (call,) = file.calls
    assert torch.equal(call["args"][0], x)
    assert call["args"][1] == [*more[:-1], (2, 3)]
    assert call["kwargs"]["deep"]["a"][1] is call["args"][0]
    assert call["kwargs"]["ordered"]["b"] is call["args"][0]
    assert call["requires_grad"] == [True, True, True]
    assert call["args"][0].untyped_storage().nbytes() == 64
    assert file.about == {"scale": 2.0}


def test_a_mapping_becomes_a_dict_and_that_is_noted(tmp_path: Path) -> None:
    file = saved(tmp_path / "f.pt", torch.ones(3, 4), batch=UserDict(ids=torch.ones(2)))
    assert torch.equal(file.calls[0]["kwargs"]["batch"]["ids"], torch.ones(2))
    assert file.notes == ("argument batch, a collections.UserDict, is a dict in the file",)


@dataclass
class Data:
    x: Any


Pair = namedtuple("Pair", ("a", "b"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Data(1), "argument thing is a .*Data; a file holds"),
        ([{"a": Pair(1, 2)}], r"argument thing\[0\]\['a'\] is a .*Pair"),
        ({1, 2}, "is a builtins.set"),
        (len, "builtin_function_or_method"),
        ({(1, 2): 3}, "keys that are neither texts nor integers"),
        (torch.ones(2, 2).to_sparse(), "another layout"),
    ],
    ids=str,
)
def test_what_is_not_plain_is_refused_by_name(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=says):
        saved(tmp_path / "f.pt", torch.ones(3, 4), thing=value)
    assert not list(tmp_path.iterdir())


def test_a_list_in_itself_is_refused(tmp_path: Path) -> None:
    model = Model()
    recording = window_of(model, torch.ones(3, 4))
    found = run_again(recording)
    endless: list[Any] = []
    endless.append(endless)
    recording.calls[0].kwargs["thing"] = endless
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        capture(recording, found, {})


def test_weights_that_are_too_large_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_mortem, "MOST_WEIGHTS", 4 * (8 + 2) - 1)
    file = saved(tmp_path / "f.pt", torch.ones(3, 4))
    assert file.weights is None
    assert file.shapes["inner.weight"] == ("torch.float32", (2, 4), True)
    assert "are not in the file" in file.notes[0]
    monkeypatch.setattr(post_mortem, "MOST_WEIGHTS", 4 * (8 + 2))
    assert saved(tmp_path / "f.pt", torch.ones(3, 4)).weights is not None


def test_two_models_in_a_window_are_refused() -> None:
    recording, models = WindowRecording(), (Model(), Model())
    for model in models:
        recording.watch(model, model)
    loss = sum(model(torch.ones(3, 4)).sum() for model in models)
    assert isinstance(loss, Tensor)
    recording.note_backward(loss)
    loss.backward()
    with pytest.raises(UnsupportedError, match="several models"):
        capture(recording, run_again(recording), {})


def test_a_write_that_fails_leaves_nothing(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(content: Any, out: Any) -> None:
        out.write(b"half of it")
        raise OSError("No space left on device")

    file = read(good)
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "f.pt", file)
    assert not list(tmp_path.iterdir())


# Files made to harm.


class Command:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_no_code_of_a_file_is_run(good: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = {**torch.load(good, weights_only=True), "about": Command(marker)}
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(ConfigError, match="weights_only=True"):
        read(tmp_path / "bad.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Command(marker)))
    with pytest.raises(ConfigError, match="no whole zip"):
        read(tmp_path / "plain.pt")
    assert not marker.exists()


def test_a_file_that_is_cut_off_is_refused_wherever_that_is(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    for length in (*range(0, len(data), 997), len(data) - 1):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        with pytest.raises(ConfigError, match="not a file of save_overflow"):
            read(tmp_path / "cut.pt")


def test_a_flipped_byte_is_refused_or_is_another_number(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    for at in range(0, len(data), 211):
        changed = bytearray(data)
        changed[at] ^= 0x41
        (tmp_path / "bad.pt").write_bytes(changed)
        with contextlib.suppress(ConfigError):  # and nothing else
            read(tmp_path / "bad.pt")


def test_what_is_no_file_of_ours_is_refused(good: Path, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    content = torch.load(good, weights_only=True)
    torch.save({**content, "format": 2}, tmp_path / "newer.pt")
    torch.save({**content, "format": "1"}, tmp_path / "text.pt")
    (tmp_path / "endless.pt").symlink_to("/dev/zero")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 24))
    for name, says in (
        ("none.pt", "no such file"),
        ("endless.pt", "no such file"),
        (".", "no such file"),
        ("other.pt", "another file of torch"),
        ("newer.pt", "of format 2, the newest that this version knows is 1; upgrade"),
        ("text.pt", "of format '1'"),
        ("bomb.pt", "larger than it is"),
    ):
        with pytest.raises(ConfigError, match=says):
            read(tmp_path / name)


def test_tensors_and_lists_that_grow_when_read_are_refused(good: Path, tmp_path: Path) -> None:
    content = torch.load(good, weights_only=True)
    many: Any = "x"
    for _ in range(20):
        many = [many] * 10
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    for name, value in (
        ("losses", [torch.zeros(1).expand(1 << 40)]),
        ("losses", [torch.zeros(4, device="meta")]),
        ("losses", [torch.zeros(4).to_sparse()]),
        ("losses", [nn.Parameter(torch.zeros(4))]),
        ("notes", tuple(many)),
        ("calls", deep),
    ):
        torch.save({**content, name: value}, tmp_path / "bad.pt")
        with pytest.raises(ConfigError, match=r"damaged|not a file"):
            read(tmp_path / "bad.pt")


WRONG = (None, True, -1, 1 << 80, 1.5, "x", (), [], {}, [[]], [{}], {"a": 1}, {1: None}, ("x", 1))


def everywhere(value: Any) -> list[Callable[[Any], None]]:
    """What puts another value in each place of a nest of lists and dicts."""
    found: list[Callable[[Any], None]] = []
    todo = [value]
    while todo:
        each = todo.pop()
        keys = each if isinstance(each, dict) else range(len(each))
        for key in list(keys)[:40]:
            if isinstance(each, (dict, list)):
                found.append(lambda new, each=each, key=key: each.__setitem__(key, new))
            if isinstance(each[key], (dict, list)):
                todo.append(each[key])
    return found


def test_a_wrong_value_anywhere_ends_in_one_line(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.pt"
    model = f"{overflowing.__file__}:net"
    count = len(everywhere(torch.load(good, weights_only=True)))
    assert count > 60
    for number in range(count):
        for wrong in (WRONG[number % len(WRONG)], WRONG[(3 * number + 1) % len(WRONG)]):
            content = torch.load(good, weights_only=True)
            everywhere(content)[number](wrong)
            buffer = io.BytesIO()
            torch.save(content, buffer)
            path.write_bytes(buffer.getvalue())
            reset()
            status = cli.main(["replay", str(path), "--model", model])
            out, err = capsys.readouterr()
            assert status in (0, 1, 2)
            assert (status == 2) == bool(err), (number, wrong, out, err)
            assert err.count("\n") <= 1
    reset()
