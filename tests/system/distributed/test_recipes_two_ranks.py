"""``finetune_lm.py`` and ``trainer_swap.py`` on two gloo ranks, through ``accel-scaler launch``.

In each step mode the held-out loss is that of one rank with twice the batch, to rounding; a run
resumed on two ranks equals the uninterrupted one bit for bit. One launch, all runs in it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import free_port, run
from lm_support import reset_accelerate, short_text, tiny_model
from recipes_script import (
    COMMON,
    FLAGS,
    HALF,
    MODES,
    RECIPES,
    SECTION,
    STEPS,
    arguments,
    lm_arguments,
)
from safetensors.torch import load_file
from versions import before_torch

pytestmark = before_torch(2, 7, "torch 2.6: torch.load knows no cpu:0, which Accelerate asks for")

pytest.importorskip("datasets")
CLOSE = 1e-4
"""To rounding, as a part of the loss: float16 products of 2 rows twice, against those of 4."""
SETTINGS = {**SECTION, **FLAGS}
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp16
num_machines: 1
num_processes: 2
accel_scaler:
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two ranks ran both recipes; settings from a section and a flag."""
    folder = tmp_path_factory.mktemp("both")
    tiny_model(folder / "plain", dropout=0.0)
    tiny_model(folder / "dropout", dropout=0.2)
    short_text(folder / "text.txt")
    section = "".join(f"  {name}: {value}\n" for name, value in SECTION.items())
    (folder / "two_ranks.yaml").write_text(CONFIG + section)
    command = ["accel_scaler", "launch", "--config_file", str(folder / "two_ranks.yaml")]
    command += [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    command += ["--main_process_port", str(free_port())]
    for rank in run(command, "recipes_script.py", folder):
        assert rank == {"told": SETTINGS, "ranks": "2"}
    return folder


Alone = Callable[[str, list[str]], None]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Alone]:
    """Run a recipe on one rank, in this process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(sys, "path", [str(RECIPES), *sys.path])
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"ACCEL_SCALER_{name.upper()}", str(value))

    def once(recipe: str, args: list[str]) -> None:
        reset_accelerate()
        importlib.import_module(recipe).main(args)

    yield once
    for recipe in ("finetune_lm", "trainer_swap"):
        sys.modules.pop(recipe, None)


def lm_losses(out: Path) -> list[float]:
    result = json.loads((out / "finetune_lm.json").read_text())
    assert [step for step, _ in result["held_out_loss"]] == [0, 2, 4, STEPS]
    return [loss for _, loss in result["held_out_loss"]]


def swap_losses(out: Path) -> list[float]:
    """Before and after."""
    words = (out / "trainer_swap.txt").read_text().split()
    return [float(words[1]), float(words[3])]


def apart(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(some, others, strict=True))


def check_losses(two_ranks: list[float], twice: list[float], once: list[float]) -> None:
    """``once``: the same number of steps with half the data, as ranks that train alone make."""
    assert apart(two_ranks, twice) < CLOSE
    assert apart(two_ranks, once) > 30 * CLOSE
    assert two_ranks[-1] < 0.9 * two_ranks[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_language_model_learns_as_one_rank_with_twice_the_batch(
    both: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    for batch, out in ((4, "twice"), (2, "once")):
        alone("finetune_lm", lm_arguments(both, "plain", batch, str(tmp_path / out)))
    check_losses(*map(lm_losses, (both / f"lm {mode}", tmp_path / "twice", tmp_path / "once")))


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_learns_as_one_rank_with_twice_the_batch(
    both: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    for batch, out in ((4, "twice"), (2, "once")):
        alone("trainer_swap", arguments(both, "plain", batch, str(tmp_path / out)))
    check_losses(*map(swap_losses, (both / f"swap {mode}", tmp_path / "twice", tmp_path / "once")))


def test_the_modes_were_in_force(both: Path) -> None:
    for found in ({mode: lm_losses(both / f"lm {mode}") for mode in MODES},
                  {mode: swap_losses(both / f"swap {mode}") for mode in MODES}):  # fmt: skip
        assert found["overlap"] == found["sync"]
        assert found["delayed"][-1] != found["sync"][-1]


def same(one: Any, other: Any) -> bool:
    """Equality through dicts and lists, bit for bit for tensors and arrays."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "shape"):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def assert_same_files(whole: Path, resumed: Path, names: set[str]) -> None:
    """Each file of two checkpoints holds the same."""
    for name in names:
        files = whole / name, resumed / name
        if name.endswith(".safetensors"):
            one, other = map(load_file, files)
        elif name.endswith(".json"):
            one, other = (json.loads(file.read_text()) for file in files)
        else:
            one, other = (torch.load(file, weights_only=False) for file in files)
        assert same(one, other), name


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_resumed_on_two_ranks_equals_the_uninterrupted_run(
    both: Path, mode: str
) -> None:
    whole, resumed = both / f"lm {mode} whole", both / f"lm {mode} resumed"
    last = Path("checkpoints") / f"step_{STEPS}"
    names = {path.name for path in (whole / last).iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl", "scaler.pt"} <= names
    assert_same_files(whole / last, resumed / last, names)
    assert lm_losses(whole) == lm_losses(resumed)
    shape = json.loads((whole / last / "finetune_lm_state.json").read_text())["shape"]
    assert shape["ranks"] == 2
    # The second half moved, and dropout drew other numbers on the other rank.
    half = load_file(whole / "checkpoints" / f"step_{HALF}" / "model.safetensors")
    assert not same(half, load_file(whole / last / "model.safetensors"))
    drawn = [torch.load(whole / last / f"random_states_{rank}.pkl", weights_only=False)
             for rank in (0, 1)]  # fmt: skip
    assert not torch.equal(drawn[0]["torch_manual_seed"], drawn[1]["torch_manual_seed"])


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_resumed_on_two_ranks_equals_the_uninterrupted_run(both: Path, mode: str) -> None:
    whole, resumed = both / f"swap {mode} whole", both / f"swap {mode} resumed"
    last = f"checkpoint-{STEPS}"
    names = {"model.safetensors", "optimizer.pt", "scheduler.pt", "scaler.pt"}
    assert_same_files(whole / last, resumed / last, names | {"rng_state_0.pth", "rng_state_1.pth"})
    assert swap_losses(whole)[1] == swap_losses(resumed)[1]
    half = load_file(whole / f"checkpoint-{HALF}" / "model.safetensors")
    assert not same(half, load_file(whole / last / "model.safetensors"))


@pytest.mark.parametrize("mode", MODES[:1])
def test_a_checkpoint_of_two_ranks_is_refused_on_one(
    both: Path, alone: Alone, tmp_path: Path, mode: str
) -> None:
    """With the reason: other batches would follow."""
    half = both / f"lm {mode} whole" / "checkpoints" / f"step_{HALF}"
    flags = [*COMMON, "--per_device_batch_size", "2", "--output_dir", str(tmp_path)]
    flags += ["--model_name_or_path", str(both / "plain"), "--train_file", str(both / "text.txt")]
    with pytest.raises(SystemExit, match="made with ranks 2, this run has 1"):
        alone("finetune_lm", [*flags, "--resume_from_checkpoint", str(half)])
