"""What ``accel-scaler replay`` prints of a file, what it says of another verdict, its status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import overflowing
import pytest
import torch
from support import reset

from accel_scaler import cli

pytestmark = pytest.mark.usefixtures("one_thread")

Says = Callable[..., str]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in which the second micro-batch of the second window overflows."""
    return overflowing.file_of_a_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def says(path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Says]:
    """Runs the command; gives its output where the status is the one that is expected."""
    state = torch.get_rng_state()

    def run(*argv: str, status: int = 0, file: Path = path) -> str:
        reset()
        assert cli.main(["replay", str(file), *argv]) == status
        out, err = capsys.readouterr()
        assert bool(err) == (status == 2)
        assert err.count("\n") <= 1
        return out + err

    yield run
    reset()
    torch.set_rng_state(state)


def model(name: str = "net") -> tuple[str, str]:
    return "--model", f"{overflowing.__file__}:{name}"


def test_what_is_in_a_file(says: Says) -> None:
    said = says()
    for part in (
        "window 1, rank 0 of 1, scale 64.0, fp16 on cpu",
        "began in: forward of head (Linear), micro-batch 1",
        "first.bias",
        "model: overflowing.Net, 8 parameters and buffers",
        "0: float32 [4, 8]",
        "factor: float 1000000.0",
        "more: dict(ids: list of 2)",
    ):
        assert part in said


def test_the_same_again_and_nothing_of_torch_is_changed(says: Says) -> None:
    threads = torch.get_num_threads()
    assert "The same verdict, bit for bit: forward of head" in says(*model())
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("what", ["weights", "input", "random", "gradient", "nonfinite", "origin"])
def test_what_differs_is_said(what: str, says: Says, path: Path, tmp_path: Path) -> None:
    content: Any = torch.load(path, weights_only=True)
    (call,) = content["calls"]
    expected = "it was: forward of head"
    if what == "weights":
        weight = content["weights"]["first.weight"]
        weight[0, 0] = weight[0, 0] * 1.5
    elif what == "input":
        call["args"][0][0, 0] += 1
    elif what == "random":
        state = call["random"]["host"]
        state.copy_(torch.Generator().manual_seed(99).get_state())
    elif what == "gradient":
        for each in call["grads"]:
            each[2].zero_()
        content["losses"][1].zero_()
        expected = "finite gradients now"
    elif what == "nonfinite":
        content["nonfinite"] = ("head.weight",)
        expected = "inf or NaN only now: first.bias"
    else:
        content["origin"]["input"][0] *= 1 + 2**-50
    torch.save(content, tmp_path / "changed.pt")
    said = says(*model(), status=1, file=tmp_path / "changed.pt")
    assert "Not the same:" in said
    assert expected in said


def test_other_versions_are_said(says: Says, path: Path, tmp_path: Path) -> None:
    content: Any = torch.load(path, weights_only=True)
    content["about"]["torch"] = "1.0"
    content["about"]["threads"] = "\x1b[2J"
    torch.save(content, tmp_path / "changed.pt")
    assert "torch was 1.0, is" in says(file=tmp_path / "changed.pt")


EVIL = "\x1b[2J\u202e\nThe same verdict, bit for bit\r\u2028\x9b31m" + "x" * 10_000


def test_texts_of_a_file_steer_no_terminal(says: Says, path: Path, tmp_path: Path) -> None:
    content: Any = torch.load(path, weights_only=True)
    content["about"] |= {"torch": EVIL, "window": EVIL, EVIL: 1}
    content["origin"] |= {"text": EVIL}
    content |= {"model": EVIL, "notes": (EVIL,), "nonfinite": (EVIL,), "fp32_modules": (EVIL,)}
    content["calls"][0]["kwargs"] |= {EVIL: EVIL}
    torch.save(content, tmp_path / "evil.pt")
    said = says(file=tmp_path / "evil.pt")
    said += says(*model(), status=2, file=tmp_path / "evil.pt")
    assert "\ufffd[2J" in said
    assert not any(line.startswith("The same") for line in said.splitlines())
    assert all(line.isprintable() and len(line) < 2_100 for line in said.splitlines())


def test_another_model_is_refused(says: Says) -> None:
    said = says(*model("other"), status=2)
    assert "head.weight is float32 [2, 8], in the file float32 [1, 8]" in said


def test_float32_modules_are_tried(says: Says) -> None:
    assert "With head in float32 all is finite: it is cured" in says(*model(), "--fp32", "hea?")
    assert "still overflows" in says(*model(), "--fp32", "first", status=1)
    assert "'head'" in says(*model(), "--fp32", "haed", status=2)


def test_modules_in_float32_are_so_again(says: Says, tmp_path: Path) -> None:
    reset()
    overflowing.main(str(tmp_path / "out"), "net", "fp32_modules=first,second")
    (path,) = (tmp_path / "out").iterdir()
    assert "The same verdict" in says(*model(), file=path)
    assert "in float32: first, second" in says(file=path)
    content: Any = torch.load(path, weights_only=True)
    torch.save({**content, "fp32_modules": ()}, tmp_path / "without.pt")
    assert "it was: " in says(*model(), status=1, file=tmp_path / "without.pt")
    torch.save({**content, "fp32_modules": ("frist",)}, tmp_path / "other.pt")
    assert "'first'" in says(*model(), status=2, file=tmp_path / "other.pt")


def test_arguments_that_say_nothing_are_refused(says: Says) -> None:
    for argv in (["--fp32", "head"], ["--weights", "w.pt"], ["--device", "cpu"]):
        assert "need --model" in says(*argv, status=2)


def test_a_file_without_weights_takes_those_of_the_model(
    says: Says, path: Path, tmp_path: Path
) -> None:
    content: Any = torch.load(path, weights_only=True)
    weights, content["weights"] = content["weights"], None
    torch.save(content, tmp_path / "without.pt")
    torch.save(weights, tmp_path / "weights.pt")
    said = says(*model("moved"), status=1, file=tmp_path / "without.pt")
    assert "The weights are those that --model gives" in said
    more = "--weights", str(tmp_path / "weights.pt")
    assert "The same verdict" in says(*model("moved"), *more, file=tmp_path / "without.pt")
