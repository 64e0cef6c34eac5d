"""Two ranks run the recipes as scripts, several times: each step mode, whole and resumed.

Not a test: ``test_recipes_two_ranks.py`` launches it, with a folder that holds the tiny models, and
reads what the recipes wrote there.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from lm_support import reset_accelerate
from places import ROOT
from transformers import Trainer, TrainingArguments

from accel_scaler import ScalerConfig

RECIPES = ROOT / "recipes"
MODES = ("delayed", "overlap", "sync")
STEPS, HALF = 6, 3
SECTION = {"init_scale": 2.0**14, "step_mode": MODES[0]}
"""What the launcher is told; the other modes follow in the same processes. From this scale nothing
overflows: half a batch may overflow where the whole one does not, by rounding alone."""
FLAGS = {"growth_interval": 2}
OVERFLOWING = 2.0**19
SHAPE = ["--block_size", "16", "--gradient_accumulation_steps", "2", "--max_eval_samples", "24"]
COMMON = [*SHAPE, "--max_steps", str(STEPS), "--learning_rate", "1e-2", "--seed", "3"]


def arguments(folder: Path, model: str, batch: int, out: str) -> list[str]:
    """The command line of one run; ``batch`` blocks on each rank."""
    files = ["--model_name_or_path", folder / model, "--train_file", folder / "text.txt"]
    files += ["--output_dir", folder / out]
    return [*COMMON, "--per_device_batch_size", str(batch), *map(str, files)]


def lm_arguments(folder: Path, model: str, batch: int, out: str) -> list[str]:
    every = ["--warmup_ratio", "0.4", "--eval_every", "2", "--checkpoint_every", str(HALF)]
    return [*arguments(folder, model, batch, out), *every]


def run(recipe: str, args: list[str]) -> None:
    """The file as it is, as ``__main__``."""
    reset_accelerate()
    sys.argv = [str(RECIPES / recipe), *args]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_lm(folder: Path, mode: str) -> None:
    run("finetune_lm.py", lm_arguments(folder, "plain", 2, f"lm {mode}"))
    os.environ["ACCEL_SCALER_INIT_SCALE"] = str(OVERFLOWING)
    # With dropout, so that each rank's random numbers have to come back too.
    run("finetune_lm.py", lm_arguments(folder, "dropout", 2, f"lm {mode} whole"))
    half = folder / f"lm {mode} whole" / "checkpoints" / f"step_{HALF}"
    resume = ["--resume_from_checkpoint", str(half)]
    run("finetune_lm.py", [*lm_arguments(folder, "dropout", 2, f"lm {mode} resumed"), *resume])


def run_swap(folder: Path, mode: str) -> None:
    run("trainer_swap.py", arguments(folder, "plain", 2, f"swap {mode}"))
    os.environ["ACCEL_SCALER_INIT_SCALE"] = str(OVERFLOWING)
    run_swap_again(folder, f"swap {mode} whole", None)
    half = folder / f"swap {mode} whole" / f"checkpoint-{HALF}"
    run_swap_again(folder, f"swap {mode} resumed", str(half))


def run_swap_again(folder: Path, out: str, checkpoint: str | None) -> None:
    """The recipe has no arguments for checkpoints: here its Trainer saves them, and resumes."""
    sys.path.insert(0, str(RECIPES))
    import trainer_swap

    stock = trainer_swap.training_arguments

    class Resuming(Trainer):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(resume_from_checkpoint=checkpoint)

    def saving(args: Any) -> TrainingArguments:
        made = stock(args)
        made.save_strategy, made.save_steps = "steps", HALF
        return made

    reset_accelerate()
    trainer_swap.Trainer, trainer_swap.training_arguments = Resuming, saving
    trainer_swap.main(arguments(folder, "dropout", 2, out))
    trainer_swap.Trainer, trainer_swap.training_arguments = Trainer, stock


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    launched = ScalerConfig.from_env()
    # A run ends with its process group; a second one cannot be made through the launcher's store.
    PartialState.destroy_process_group = lambda *_: None
    for mode in MODES:
        for runs in (run_lm, run_swap):
            settings = {**SECTION, **FLAGS, "step_mode": mode}
            os.environ |= {f"ACCEL_SCALER_{k.upper()}": str(v) for k, v in settings.items()}
            runs(folder, mode)
    rank = int(os.environ["RANK"])
    told = {name: getattr(launched, name) for name in (*SECTION, *FLAGS)}
    torch.save({"told": told, "ranks": os.environ["WORLD_SIZE"]}, folder / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
