"""``finetune_lm.py`` and ``trainer_swap.py`` on two gloo ranks.

In each step mode the held-out loss is that of one rank with twice the batch, to rounding; a run
resumed on two ranks equals the uninterrupted one bit for bit.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from children import on_two_ranks
from places import ROOT
from recipe_support import short_text, tiny_model
from safetensors.torch import load_file
from support import reset, same
from versions import before_torch

pytestmark = [
    before_torch(2, 7, "torch 2.6: torch.load knows no cpu:0, which Accelerate asks for"),
    pytest.mark.usefixtures("one_thread"),
]

pytest.importorskip("datasets")
CLOSE = 1e-4
"""To rounding, as a part of the loss: float16 products of 2 rows twice, against those of 4."""
MODES = ("delayed", "overlap", "sync")
STEPS, HALF = 6, 3
SCALE, OVERFLOWING = 2.0**14, 2.0**19
"""From the first nothing overflows: half a batch may overflow where the whole one does not, by
rounding alone."""
RUN = {
    **{"block_size": 16, "gradient_accumulation_steps": 2, "max_eval_samples": 24},
    **{"max_steps": STEPS, "learning_rate": 1e-2, "seed": 3},
}
LM = {"warmup_ratio": 0.4, "eval_every": 2, "checkpoint_every": HALF}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "plain", dropout=0.0)
    tiny_model(folder / "dropout", dropout=0.2)
    short_text(folder / "text.txt")
    return folder


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(SCALE))
    monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", "2")
    monkeypatch.syspath_prepend(ROOT / "recipes")
    # A run ends with its process group; a second one cannot be made through the same store.
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda *_: None)


def run(
    recipe: str, models: Path, batch: int, out: Path, model: str = "plain", **more: Any
) -> None:
    """``batch`` blocks on each rank."""
    reset()
    files = {"model_name_or_path": models / model, "train_file": models / "text.txt"}
    flags = RUN | (LM if recipe == "finetune_lm" else {}) | files | more
    flags |= {"per_device_batch_size": batch, "output_dir": out}
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    importlib.import_module(recipe).main([word for pair in pairs for word in pair])


def losses(out: Path) -> list[float]:
    if (out / "trainer_swap.txt").exists():  # before and after
        words = (out / "trainer_swap.txt").read_text().split()
        return [float(words[1]), float(words[3])]
    result = json.loads((out / "finetune_lm.json").read_text())
    assert [step for step, _ in result["held_out_loss"]] == [0, 2, 4, STEPS]
    return [loss for _, loss in result["held_out_loss"]]


def apart(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("recipe", ["finetune_lm", "trainer_swap"])
def test_two_ranks_learn_as_one_with_twice_the_batch(
    recipe: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        for mode in MODES:
            monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
            run(recipe, models, 2, tmp_path / f"both {mode}")

    on_two_ranks(body, tmp_path)
    found = {}
    for mode in MODES:
        monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
        found[mode] = losses(tmp_path / f"both {mode}")
        run(recipe, models, 4, tmp_path / f"twice {mode}")
        assert apart(found[mode], losses(tmp_path / f"twice {mode}")) < CLOSE
        assert found[mode][-1] < 0.9 * found[mode][0]
    # The same number of steps with half the data, as ranks that train alone make.
    run(recipe, models, 2, tmp_path / "once")
    assert apart(found["sync"], losses(tmp_path / "once")) > 30 * CLOSE
    assert found["overlap"] == found["sync"]
    assert found["delayed"][-1] != found["sync"][-1]


def contents(folder: Path) -> dict[str, Any]:
    """Whatever ``save_state`` wrote, by the name of the file."""
    readers = {".safetensors": load_file, ".json": lambda path: json.loads(path.read_text())}
    loads = lambda path: torch.load(path, weights_only=False)  # noqa: E731
    return {p.name: readers.get(p.suffix, loads)(p) for p in folder.iterdir()}


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_resumed_on_two_ranks_equals_the_uninterrupted_run(
    mode: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, so that each rank's random numbers have to come back too."""
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(OVERFLOWING))
    half = tmp_path / "whole" / "checkpoints" / f"step_{HALF}"

    def body() -> None:
        run("finetune_lm", models, 2, tmp_path / "whole", "dropout")
        out = tmp_path / "resumed"
        run("finetune_lm", models, 2, out, "dropout", resume_from_checkpoint=half)

    on_two_ranks(body, tmp_path)
    last = Path("checkpoints") / f"step_{STEPS}"
    whole, resumed = (contents(tmp_path / name / last) for name in ("whole", "resumed"))
    assert {"random_states_0.pkl", "random_states_1.pkl", "scaler.pt"} <= whole.keys()
    for name, content in whole.items():
        assert same(content, resumed[name]), name
    assert losses(tmp_path / "whole") == losses(tmp_path / "resumed")
    assert whole["finetune_lm_state.json"]["shape"]["ranks"] == 2
    # The second half moved, and dropout drew other numbers on the other rank.
    name = "model.safetensors"
    assert not same(contents(half)[name], whole[name])
    drawn = [whole[f"random_states_{rank}.pkl"]["torch_manual_seed"] for rank in (0, 1)]
    assert not torch.equal(*drawn)
    if mode == "sync":  # on one rank other batches would follow
        out = tmp_path / "alone"
        with pytest.raises(SystemExit, match="made with ranks 2, this run has 1"):
            run("finetune_lm", models, 2, out, "dropout", resume_from_checkpoint=half)
