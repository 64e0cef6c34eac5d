"""A Trainer without ``attach``, beside one with the class that torch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW
from trainer_support import arguments, examples, gpt2, logs, train
from transformers import Trainer

from accel_scaler import offloaded


def trainer(path: Path, cls: Any, model: Any = None, **settings: Any) -> Any:
    return Trainer(
        model=gpt2() if model is None else model,
        args=arguments(path, fp16=False, save_strategy="steps", save_steps=4, **settings),
        train_dataset=examples(),
        optimizer_cls_and_kwargs=(cls, {"lr": 1e-2}),
    )


def results(trained: Any) -> list[Any]:
    """Parameters and state, on the CPU."""
    state = trained.optimizer.state_dict()["state"]
    entries = [state[n][key].cpu() for n in sorted(state) for key in sorted(state[n])]
    return [*[p.detach().cpu() for p in trained.model.parameters()], *entries]


def assert_trainers_are_equal(path: Path, **settings: Any) -> None:
    """From the start, and resumed from each other's checkpoints; with the groups, the schedule, the
    clip and the micro-batches of the Trainer."""
    model = gpt2()
    kinds = {"stock": AdamW, "mine": offloaded(AdamW), "watched": offloaded(AdamW, model)}
    runs = {
        name: train(trainer(path / name, cls, model if name == "watched" else None, **settings))
        for name, cls in kinds.items()
    }
    expected = results(runs["stock"])
    assert len(runs["mine"].optimizer.param_groups) == 2, "with weight decay, and without"
    resumed = [("stock", "mine"), ("mine", "stock"), ("mine", "mine")]
    others = [runs["mine"], runs["watched"]]
    for begun, ended in resumed:
        again = trainer(path / "resumed", kinds[ended], **settings)
        others.append(train(again, resume_from_checkpoint=str(path / begun / "checkpoint-4")))
    for other in others:
        found = results(other)
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)
        assert logs(other)[-3:-1] == logs(runs["stock"])[-3:-1]
