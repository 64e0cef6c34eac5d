"""``finetune_lm.py`` on one process: its defaults, checkpoints, your own text, what it refuses.

A resumed run is compared with the uninterrupted one bit for bit: parameters, optimizer, schedule,
scaler, random states, held-out losses.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lm_support import reset_accelerate, short_text, tiny_model
from places import ROOT
from safetensors.torch import load_file

pytest.importorskip("datasets")
RECIPES = ROOT / "recipes"
STEPS, HALF = 12, 6
RESULT = "finetune_lm.json"


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    """The recipe as a module."""
    sys.path.insert(0, str(RECIPES))
    try:
        import finetune_lm

        yield finetune_lm
    finally:
        sys.path.remove(str(RECIPES))
        sys.modules.pop("finetune_lm", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments: a tiny model with dropout, and a text of eleven micro-batches."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(folder / "model", dropout=0.2)
    text = short_text(folder / "text.txt", characters=860)
    flags = ["--model_name_or_path", str(model), "--train_file", str(text), "--seed", "3"]
    flags += ["--block_size", "16", "--per_device_batch_size", "4", "--learning_rate", "1e-2"]
    return [*flags, "--max_steps", str(STEPS), "--eval_every", "3", "--max_eval_samples", "6"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def run(recipe: ModuleType, *args: object) -> None:
    """The recipe in this process, as in one of its own."""
    reset_accelerate()
    recipe.main([str(arg) for arg in args])


def refusal(recipe: ModuleType, *args: object) -> str:
    """The one line that a run ends with."""
    reset_accelerate()
    with pytest.raises(SystemExit) as ended:
        recipe.main([str(arg) for arg in args])
    message = ended.value.code
    assert isinstance(message, str), "not a message: exit status 0, or argparse"
    assert message.startswith("finetune_lm: error: ")
    assert "\n" not in message
    return message


class Interruptions:
    """Makes the progress bar raise at a step: the run is cut off in the middle of its loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recipe: ModuleType) -> None:
        self.monkeypatch, self.recipe = monkeypatch, recipe

    def at(self, step: int, *args: object) -> None:
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
                run(self.recipe, *args)


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


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Where two nested values differ, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {*one, *other}
        return [
            found
            for key in sorted(keys, key=str)
            for found in differences(one.get(key), other.get(key), f"{name}/{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=False))
        found = [f for i, (a, b) in pairs for f in differences(a, b, f"{name}/{i}")]
        return found if len(one) == len(other) else [*found, f"{name}: length"]
    if hasattr(one, "shape") and hasattr(other, "shape"):  # numpy's random state has arrays too
        same = one.shape == other.shape and bool((one == other).all())
        return [] if same and one.dtype == other.dtype else [name]
    return [] if one == other else [name]


# --- whole runs -----------------------------------------------------------------------------------


def test_it_learns_with_its_defaults_and_its_model_loads(
    recipe: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    run(recipe, "--max_steps", "10", "--eval_every", "5")
    said = capsys.readouterr()
    for line in ("step 0: held-out loss", "step 5:", "step 10:", "scaler: 10 windows, 0 skipped"):
        assert line in said.out
    for part in ("loss=", "scale=", "skips="):
        assert part in said.err
    out = tmp_path / "out" / "finetune_lm"
    result = json.loads((out / "finetune_lm.json").read_text())
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

    run(recipe, "--max_steps", "1", "--eval_every", "0")  # replaces the result
    result = json.loads((out / "finetune_lm.json").read_text())
    assert [step for step, _ in result["held_out_loss"]] == [0, 1]


def test_the_held_out_loss_is_that_of_the_saved_model(
    recipe: ModuleType, tiny: list[str], tmp_path: Path
) -> None:
    """Beside transformers' own loss, in float32, over the same blocks; the last batch is short."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(recipe, *tiny, "--output_dir", tmp_path, "--per_device_batch_size", 1)
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
    result = json.loads((tmp_path / "finetune_lm.json").read_text())
    assert result["held_out_loss"][-1][1] == pytest.approx(expected, rel=1e-3)


MODES: dict[str, dict[str, str]] = {
    "sync": {},
    "overlap": {},
    "delayed, with a warm-up": {"DELAY_WARMUP_STEPS": str(HALF + 2)},
}


@pytest.mark.parametrize("name", MODES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    recipe: ModuleType,
    interrupted: Interruptions,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    """Cut off two steps after a checkpoint that lies in the middle of the second epoch.

    Eleven micro-batches an epoch, two a step: a window goes on from one epoch into the next.
    """
    # A start so high that steps on both sides of the checkpoint overflow.
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(2.0**20))
    monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", "1")
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", name.partition(",")[0])
    for field, value in MODES[name].items():
        monkeypatch.setenv(f"ACCEL_SCALER_{field}", value)
    command = [*tiny, "--checkpoint_every", HALF]
    run(recipe, *command, "--output_dir", tmp_path / "whole")
    interrupted.at(HALF + 2, *command, "--output_dir", tmp_path / "cut")
    assert sorted(recipe.checkpoints(tmp_path / "cut")) == [HALF]
    resume = ["--resume_from_checkpoint", "latest"]
    run(recipe, *command, "--output_dir", tmp_path / "cut", *resume)
    assert sorted(recipe.checkpoints(tmp_path / "cut")) == [HALF, STEPS]

    half = everything(tmp_path / "whole" / "checkpoints" / f"step_{HALF}")
    ends = [tmp_path / each / "checkpoints" / f"step_{STEPS}" for each in ("whole", "cut")]
    whole, cut = map(everything, ends)
    assert differences(whole, cut) == []
    assert differences(*(outcome(tmp_path / each) for each in ("whole", "cut"))) == []
    # What makes the comparison worth something: there was training and there were skips in both
    # halves, and the halves differ in everything that changes.
    assert whole["finetune_lm_state.json"]["shape"]["training_blocks"] // 4 == 11
    loss = dict(whole["finetune_lm_state.json"]["held_out"])
    assert sorted(loss) == [0, 3, 6, 9, 12]
    assert loss[12] < loss[6] < loss[0]
    moved = [half["scheduler.bin"]["last_epoch"], whole["scheduler.bin"]["last_epoch"]]
    assert 0 < moved[0] < HALF
    assert 0 < moved[1] - moved[0] < STEPS - HALF
    for part in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
        assert differences(half[part], whole[part])


def outcome(out: Path) -> dict[str, Any]:
    """What a run leaves when it has ended."""
    return {"model": load_file(out / "model.safetensors"), "result": (out / RESULT).read_text()}


def test_evaluating_more_often_trains_the_same(
    recipe: ModuleType, tiny: list[str], tmp_path: Path
) -> None:
    """It draws none of dropout's random numbers, and the model drops units again afterwards."""
    for every in ("0", "1"):
        run(recipe, *tiny, "--eval_every", every, "--output_dir", tmp_path / every)
    often, never = (load_file(tmp_path / each / "model.safetensors") for each in ("1", "0"))
    assert differences(often, never) == []


@pytest.fixture
def cut_off(
    recipe: ModuleType, interrupted: Interruptions, tiny: list[str], tmp_path: Path
) -> list[object]:
    """The command of a run that ended at step 5, with checkpoints at 2 and 4."""
    command = [*tiny, "--checkpoint_every", 2, "--output_dir", tmp_path / "out"]
    interrupted.at(5, *command)
    return command


def test_a_run_that_has_not_ended_is_not_thrown_away(
    recipe: ModuleType, cut_off: list[object], tmp_path: Path
) -> None:
    saved = recipe.checkpoints(tmp_path / "out")
    assert sorted(saved) == [2, 4]
    said = refusal(recipe, *cut_off)
    assert "has not ended, at step 4" in said
    assert "--resume_from_checkpoint latest" in said
    assert recipe.checkpoints(tmp_path / "out") == saved


def test_a_checkpoint_that_was_cut_off_is_not_the_latest(
    recipe: ModuleType, cut_off: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``finetune_lm_state.json`` is written when everything else is there."""
    torn = tmp_path / "out" / "checkpoints" / "step_4"
    (torn / "finetune_lm_state.json").unlink()
    said = refusal(recipe, *cut_off, "--resume_from_checkpoint", torn)
    assert "not a complete checkpoint of this recipe" in said
    run(recipe, *cut_off, "--resume_from_checkpoint", "latest")
    assert "step_2, at step 2" in capsys.readouterr().out


def test_a_fresh_run_leaves_no_checkpoint_of_an_earlier_one(
    recipe: ModuleType, cut_off: list[object], interrupted: Interruptions, tmp_path: Path
) -> None:
    interrupted.at(3, *cut_off, "--overwrite_output_dir")
    assert sorted(recipe.checkpoints(tmp_path / "out")) == [2]


def test_a_checkpoint_of_another_directory_is_left_there(
    recipe: ModuleType, cut_off: list[object], tmp_path: Path
) -> None:
    saved = recipe.checkpoints(tmp_path / "out")
    given = ["--resume_from_checkpoint", saved[2], "--output_dir", tmp_path / "other"]
    run(recipe, *cut_off, *given)
    assert recipe.checkpoints(tmp_path / "out") == saved
    assert sorted(recipe.checkpoints(tmp_path / "other")) == [4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--seed", "4"], "made with seed 3, this run has 4"),
        (["--per_device_batch_size", "2"], "made with per_device_batch_size 4, this run has 2"),
        (["--max_steps", "4"], "has made 4 steps of 4"),
    ],
)
def test_a_run_that_would_not_go_on_as_it_began_is_refused(
    recipe: ModuleType, cut_off: list[object], change: list[str], expected: str
) -> None:
    said = refusal(recipe, *cut_off, *change, "--resume_from_checkpoint", "latest")
    assert expected in said


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

    reset_accelerate()
    args = recipe.parse_args(["--output_dir", str(tmp)])
    accelerator = recipe.make_accelerator(args)
    blocks = Dataset.from_dict({"input_ids": [[n, n] for n in range(11)]})
    loader = accelerator.prepare(recipe.make_loaders((blocks, blocks), 2)[0])
    stream = recipe.micro_batches(accelerator, loader, seen)
    return [next(stream)["input_ids"].tolist() for _ in range(number)]


@pytest.mark.parametrize("seen", [0, 3, 5, 12])
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


@pytest.mark.parametrize("column", ["words", "text"])
@pytest.mark.parametrize("name", ["own.csv", "own.jsonl", "own.txt"])
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
    files += ["--text_column", column, "--output_dir", tmp_path / "out"]
    run(recipe, *tiny, *files)
    result = json.loads((tmp_path / "out" / RESULT).read_text())
    steps, losses = zip(*result["held_out_loss"], strict=True)
    assert steps == (0, 3, 6, 9, 12)
    assert losses[-1] < losses[0] - 1  # the lines differ in their numbers only


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def no_model(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the input was refused")

    monkeypatch.setattr(recipe, "load_model", too_late)


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
def test_bad_input_is_refused_in_one_line_before_a_model_is_loaded(
    recipe: ModuleType,
    no_model: None,
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


def test_help_explains_every_argument(
    recipe: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        recipe.parse_args(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a directory with anything else in it is refused" in shown
    assert "'latest' is the one in --output_dir with most steps" in shown
    assert "--dataset_config" in shown
