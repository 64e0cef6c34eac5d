"""``finetune_lm.py`` on one process: its defaults, checkpoints, your own text, what it refuses.

A resumed run is compared with the uninterrupted one bit for bit: parameters, optimizer, schedule,
scaler, random states, held-out losses.
"""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recipe_support import refusal, run, short_text, tiny_model
from safetensors.torch import load_file
from support import reset, same

STEPS, HALF = 12, 6


@pytest.fixture(name="recipe")
def finetune_lm(recipe: Any) -> ModuleType:
    found: ModuleType = recipe("finetune_lm")
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments: a tiny model with dropout, and a text of eleven micro-batches."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(folder / "model", dropout=0.2)
    text = short_text(folder / "text.txt", characters=860)
    flags = ["--model_name_or_path", str(model), "--train_file", str(text), "--seed", "3"]
    flags += ["--block_size", "16", "--per_device_batch_size", "4", "--learning_rate", "1e-2"]
    return [*flags, "--max_steps", str(STEPS), "--eval_every", "3", "--max_eval_samples", "6"]


class Interruptions:
    """Makes the progress bar raise at a step: the run is cut off in the middle of its loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recipe: ModuleType) -> None:
        self.monkeypatch, self.recipe = monkeypatch, recipe

    def at(self, step: int, out: Path, *args: object) -> None:
        stock = self.recipe.tqdm

        class Bar(stock):  # type: ignore[misc, valid-type]
            def update(self, n: float = 1) -> None:
                super().update(n)
                if self.n == step:
                    self.close()
                    raise KeyboardInterrupt

        with self.monkeypatch.context() as patch:
            patch.setattr(self.recipe, "tqdm", Bar)
            with pytest.raises(KeyboardInterrupt):
                run(self.recipe, out, *args)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, recipe: ModuleType) -> Interruptions:
    return Interruptions(monkeypatch, recipe)


def everything(folder: Path) -> dict[str, Any]:
    """Whatever ``save_state`` wrote, by the name of the file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
        else:
            found[path.name] = torch.load(path, weights_only=False)
    return found


# --- whole runs -----------------------------------------------------------------------------------


def test_it_learns_with_its_defaults_and_its_model_loads(
    recipe: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    result = json.loads(run(recipe, out, "--max_steps", "10", "--eval_every", "5"))
    said = capsys.readouterr()
    for line in ("step 0: held-out loss", "step 5:", "step 10:", "scaler: 10 windows, 0 skipped"):
        assert line in said.out
    for part in ("loss=", "scale=", "skips="):
        assert part in said.err
    steps, losses = zip(*result["held_out_loss"], strict=True)
    assert steps == (0, 5, 10)
    # An untrained model guesses among 1024 tokens.
    assert losses[0] == pytest.approx(math.log(1024), abs=0.1)
    assert losses[2] < losses[1] < losses[0]
    text = "The while statement"
    tokenizer = AutoTokenizer.from_pretrained(out)
    batch = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"][0]) == text
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model(input_ids=batch["input_ids"]).logits.shape[-1] == 1024
    assert not (out / "checkpoints").exists()

    # It replaces the result.
    result = json.loads(run(recipe, out, "--max_steps", "1", "--eval_every", "0"))
    assert [step for step, _ in result["held_out_loss"]] == [0, 1]


def test_the_held_out_loss_is_that_of_the_saved_model(
    recipe: ModuleType, tiny: list[str], tmp_path: Path
) -> None:
    """Beside transformers' own loss, in float32, over the same blocks; the last batch is short."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = json.loads(run(recipe, tmp_path, *tiny, "--per_device_batch_size", 1))
    args = recipe.parse_args(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    blocks = recipe.load_blocks(recipe.load_texts(args), tokenizer, args)
    ids = torch.tensor(blocks[1]["input_ids"])
    # Of the training blocks none is among them, and they are the end of the text.
    assert ids.shape == (5, 16)
    assert not {tuple(b) for b in ids.tolist()} & {tuple(b) for b in blocks[0]["input_ids"]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss.item()
    assert result["held_out_loss"][-1][1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    recipe: ModuleType,
    interrupted: Interruptions,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str,
) -> None:
    """Cut off two steps after a checkpoint that lies in the middle of the second epoch, and of
    the warm-up.

    Eleven micro-batches an epoch, two a step: a window goes on from one epoch into the next.
    """
    # A start so high that steps on both sides of the checkpoint overflow.
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(2.0**20))
    monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", "1")
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    monkeypatch.setenv("ACCEL_SCALER_DELAY_WARMUP_STEPS", str(HALF + 2))
    command = [*tiny, "--checkpoint_every", HALF]
    results = [run(recipe, tmp_path / "whole", *command)]
    interrupted.at(HALF + 2, tmp_path / "cut", *command)
    assert sorted(recipe.checkpoints(tmp_path / "cut")) == [HALF]
    results += [run(recipe, tmp_path / "cut", *command, "--resume_from_checkpoint", "latest")]
    assert sorted(recipe.checkpoints(tmp_path / "cut")) == [HALF, STEPS]
    assert results[0] == results[1]

    half = everything(tmp_path / "whole" / "checkpoints" / f"step_{HALF}")
    ends = [tmp_path / each / "checkpoints" / f"step_{STEPS}" for each in ("whole", "cut")]
    whole, cut = map(everything, ends)
    assert whole.keys() == cut.keys()
    assert [name for name in whole if not same(whole[name], cut[name])] == []
    # What makes the comparison worth something: there was training and there were skips in both
    # halves, and the halves differ in everything that changes.
    loss = dict(whole["finetune_lm_state.json"]["held_out"])
    assert sorted(loss) == [0, 3, 6, 9, 12]
    assert loss[12] < loss[6] < loss[0]
    moved = [half["scheduler.bin"]["last_epoch"], whole["scheduler.bin"]["last_epoch"]]
    assert 0 < moved[0] < HALF
    assert 0 < moved[1] - moved[0] < STEPS - HALF
    for part in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
        assert not same(half[part], whole[part])


def test_evaluating_more_often_trains_the_same(
    recipe: ModuleType, tiny: list[str], tmp_path: Path
) -> None:
    """It draws none of dropout's random numbers, and the model drops units again afterwards."""
    for every in ("0", "1"):
        run(recipe, tmp_path / every, *tiny, "--eval_every", every)
    assert same(*(load_file(tmp_path / each / "model.safetensors") for each in ("1", "0")))


def test_a_run_that_was_cut_off_goes_on_as_it_began_or_is_refused(
    recipe: ModuleType,
    interrupted: Interruptions,
    tiny: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is not thrown away, and ``finetune_lm_state.json`` is written when all else is there."""
    out, command = tmp_path / "out", [*tiny, "--checkpoint_every", 2]
    interrupted.at(5, out, *command)
    saved, here = recipe.checkpoints(out), ["--output_dir", out]
    assert sorted(saved) == [2, 4]
    said = refusal(recipe, *command, *here)
    assert "has not ended, at step 4" in said
    assert "--resume_from_checkpoint latest" in said
    for change, expected in (
        (["--seed", "4"], "made with seed 3, this run has 4"),
        (["--per_device_batch_size", "2"], "made with per_device_batch_size 4, this run has 2"),
        (["--max_steps", "4"], "has made 4 steps of 4"),
    ):
        latest = ["--resume_from_checkpoint", "latest"]
        assert expected in refusal(recipe, *command, *here, *change, *latest)
    # A checkpoint of another directory is left there.
    run(recipe, tmp_path / "other", *command, "--resume_from_checkpoint", saved[2])
    assert recipe.checkpoints(out) == saved
    assert sorted(recipe.checkpoints(tmp_path / "other")) == [4, 6, 8, 10, 12]
    # One that was cut off is not the latest.
    (saved[4] / "finetune_lm_state.json").unlink()
    torn = ["--resume_from_checkpoint", saved[4]]
    said = refusal(recipe, *command, *here, *torn)
    assert "not a complete checkpoint of this recipe" in said
    run(recipe, out, *command, *latest)
    assert "step_2, at step 2" in capsys.readouterr().out
    # A fresh run leaves none of an earlier one.
    interrupted.at(3, out, *command, "--overwrite_output_dir")
    assert sorted(recipe.checkpoints(out)) == [2]


# --- the data -------------------------------------------------------------------------------------


def test_blocks_are_the_text_in_order_with_an_end_after_each(
    recipe: ModuleType, tiny: list[str]
) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny[1])
    blocks = recipe.cut(Dataset.from_dict({"text": ["ab", None, " ", "cdefgh"]}), tokenizer, 4)
    text = "".join(tokenizer.decode(block) for block in blocks["input_ids"])
    assert text == "ab<end>cdefgh"[: len(text)]
    assert {len(block) for block in blocks["input_ids"]} == {4}
    assert len(blocks) == 10 // 4


def order_of(recipe: ModuleType, seen: int, number: int, tmp: Path) -> list[list[list[int]]]:
    """The blocks of ``number`` micro-batches after ``seen``."""
    from datasets import Dataset

    reset()
    args = recipe.parse_args(["--output_dir", str(tmp)])
    accelerator = recipe.make_accelerator(args)
    blocks = Dataset.from_dict({"input_ids": [[n, n] for n in range(11)]})
    loader = accelerator.prepare(recipe.make_loaders((blocks, blocks), 2)[0])
    stream = recipe.micro_batches(accelerator, loader, seen)
    return [next(stream)["input_ids"].tolist() for _ in range(number)]


@pytest.mark.parametrize("seen", [3, 5, 12])
def test_micro_batches_after_a_checkpoint_are_those_that_come_after_it(
    recipe: ModuleType, tmp_path: Path, seen: int
) -> None:
    whole = order_of(recipe, 0, 20, tmp_path)
    epochs = [list(chain.from_iterable(whole[at : at + 5])) for at in range(0, 20, 5)]
    assert all(len({n for n, _ in epoch}) == 10 for epoch in epochs)  # of 11, none twice
    assert len({str(whole[at : at + 5]) for at in range(0, 20, 5)}) == 4  # each in its own order
    state = torch.get_rng_state()
    assert order_of(recipe, seen, 20 - seen, tmp_path) == whole[seen:]
    # An epoch begun in the middle draws as little of dropout's numbers as one begun at its start.
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "column"), [("own.csv", "words"), ("own.jsonl", "words"), ("own.txt", "text")]
)
def test_it_learns_from_your_files(
    recipe: ModuleType, tiny: list[str], tmp_path: Path, name: str, column: str
) -> None:
    words = [f"line {n} of a text, NA and None in it" for n in range(30)]
    for path in (tmp_path / name, tmp_path / f"held_{name}"):
        if name.endswith(".csv"):
            path.write_text("\n".join([column, *(f'"{w}"' for w in words)]))
        elif name.endswith(".jsonl"):
            path.write_text("\n".join(json.dumps({column: w}) for w in words))
        else:
            path.write_text("\n".join(words))
    files = ["--train_file", tmp_path / name, "--validation_file", tmp_path / f"held_{name}"]
    result = json.loads(run(recipe, tmp_path / "out", *tiny, *files, "--text_column", column))
    steps, losses = zip(*result["held_out_loss"], strict=True)
    assert steps == (0, 3, 6, 9, 12)
    assert losses[-1] < losses[0] - 1  # the lines differ in their numbers only


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--train_file", "nowhere.txt"], "no such file: nowhere.txt"),
        (["--train_file", "blank.txt"], "blank.txt is empty"),
        (["--train_file", "broken.jsonl"], "broken.jsonl cannot be read"),
        (["--train_file", "latin.txt"], "latin.txt cannot be read: 'utf-8' codec"),
        (["--train_file", "own.csv"], "has no column 'text', only: body (set --text_column)"),
        (["--train_file", "a.txt", "--dataset_name", "b"], "not both"),
        (["--dataset_config", "b"], "--dataset_config needs --dataset_name"),
        (["--dataset_name", "nowhere"], "--dataset_name nowhere"),
        (["--block_size", "1"], "no next token"),
        (["--output_dir", "own.csv"], "--output_dir own.csv is a file"),
        (["--output_dir", "thesis"], "another origin"),
        (["--resume_from_checkpoint", "latest"], "no complete checkpoint in out/finetune_lm"),
        (["--resume_from_checkpoint", "thesis"], "thesis is not a complete checkpoint"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(
    recipe: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text(" \n\n")
    Path("broken.jsonl").write_text("{not json\n")
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    Path("own.csv").write_text("body\nsome words\n")
    Path("thesis").mkdir()
    Path("thesis/work.txt").write_text("years")
    before = sorted(tmp_path.rglob("*"))
    assert expected in refusal(recipe, *flags)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--block_size", "65"], "the model takes at most 64 tokens"),
        (["--block_size", "64", "--per_device_batch_size", "99"], "do not fill one batch of 99"),
        (["--train_file", "word.txt"], "the text fills 0 blocks of 16 tokens"),
        (["--validation_file", "word.txt"], "held-out text does not fill one block"),
        (["--model_name_or_path", "nowhere"], "--model_name_or_path nowhere"),
    ],
)
def test_what_does_not_fit_the_model_or_the_text_is_refused(
    recipe: ModuleType,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("word.txt").write_text("word")
    assert expected in refusal(recipe, *tiny, *flags)
    assert not Path("out").exists()
