"""``finetune_lm.py`` on two gloo ranks: a resumed run equals the uninterrupted one bit for bit."""

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
STEPS, HALF = 6, 3
OVERFLOWING = 2.0**19
RUN = {
    **{"block_size": 16, "gradient_accumulation_steps": 2, "max_eval_samples": 24},
    **{"max_steps": STEPS, "learning_rate": 1e-2, "seed": 3, "per_device_batch_size": 2},
    **{"warmup_ratio": 0.4, "eval_every": 2, "checkpoint_every": HALF},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "dropout", dropout=0.2)
    short_text(folder / "text.txt")
    return folder


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(OVERFLOWING))
    monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", "2")
    monkeypatch.syspath_prepend(ROOT / "recipes")
    # A run ends with its process group; a second one cannot be made through the same store.
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda *_: None)


def run(models: Path, out: Path, **more: Any) -> None:
    reset()
    files = {"model_name_or_path": models / "dropout", "train_file": models / "text.txt"}
    flags = RUN | files | more | {"output_dir": out}
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    importlib.import_module("finetune_lm").main([word for pair in pairs for word in pair])


def losses(out: Path) -> Any:
    return json.loads((out / "finetune_lm.json").read_text())["held_out_loss"]


def contents(folder: Path) -> dict[str, Any]:
    """Whatever ``save_state`` wrote, by the name of the file."""
    readers = {".safetensors": load_file, ".json": lambda path: json.loads(path.read_text())}
    loads = lambda path: torch.load(path, weights_only=False)  # noqa: E731
    return {p.name: readers.get(p.suffix, loads)(p) for p in folder.iterdir()}


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_language_model_resumed_on_two_ranks_equals_the_uninterrupted_run(
    mode: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, so that each rank's random numbers have to come back too."""
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    half = tmp_path / "whole" / "checkpoints" / f"step_{HALF}"

    def body() -> None:
        run(models, tmp_path / "whole")
        out = tmp_path / "resumed"
        run(models, out, resume_from_checkpoint=half)

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
            run(models, out, resume_from_checkpoint=half)
