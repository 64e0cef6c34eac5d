"""The recipes: run for a few steps, offline, with what each claims; and what they refuse.

What they refuse is one line, said before anything is written. ``finetune_lm``: test_recipe_lm.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from launching import STOCK
from launching import run as launch
from PIL import Image
from places import ROOT
from recipe_support import RECIPES, refusal, run
from safetensors.torch import load_file
from support import same
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from accel_scaler.cli import main as command_line

Recipe = Callable[[str], ModuleType]
LAUNCH = [*STOCK, "-q", "--config_file", ROOT / "accelerate_configs" / "cpu_fp16.yaml"]
FEW = ["--max_steps", "2", "--max_eval_samples", "8"]
SMALL = [*FEW, "--per_device_batch_size", "2", "--max_length", "16"]
TINY = ["--per_device_batch_size", "2", "--block_size", "16", "--max_eval_samples", "4"]
SPOILT = "transformer.h.1.mlp.c_proj"  # not the default, so not one that the recipe knows
ROWS = [(f"a {kind} thing, number {n}", kind) for n in range(8) for kind in ("good", "bad")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file that is quickly read, and learned."""
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven\n\n" * 60, encoding="utf-8")
    return path


def write_rows(path: Path, rows: list[tuple[str, str]], text: str = "text") -> Path:
    """Write rows as CSV or as JSON lines, by the name of the file."""
    if path.suffix == ".csv":
        lines = [f"{text},label", *(f'"{words}",{label}' for words, label in rows)]
    else:
        lines = [json.dumps({text: words, "label": label}) for words, label in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags"),
    [("finetune_classifier", SMALL), ("trainer_swap", FEW), ("gan", ["--max_steps", "6"])],
)
def test_a_step_mode_in_the_environment_changes_no_number(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, flags: list[str]
) -> None:
    """``ACCEL_SCALER_STEP_MODE=overlap`` with the recipe as it is."""
    saved = []
    for mode in ("sync", "overlap"):
        monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
        run(recipe(name), tmp_path / mode, *flags)
        saved.append(load_file(tmp_path / mode / "model.safetensors"))
    assert same(*saved)


@pytest.mark.parametrize(
    "name", ["finetune_classifier", "trainer_swap", "gan", "fp16_weights", "find_overflow"]
)
def test_a_directory_of_another_origin_is_left_alone(
    recipe: Recipe, tmp_path: Path, name: str
) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work", encoding="utf-8")
    said = refusal(recipe(name), "--output_dir", tmp_path)
    assert "another origin" in said
    assert "--overwrite_output_dir" in said
    assert "is a file" in refusal(recipe(name), "--output_dir", thesis)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["trainer_swap", "fp16_weights", "find_overflow"])
def test_texts_and_models_that_are_not_there_are_named(
    recipe: Recipe, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n", encoding="utf-8")
    for flags, expected in (
        (["--train_file", "nowhere.txt"], "no such file"),
        (["--train_file", "empty.txt"], "empty"),
        (["--model_name_or_path", "nowhere"], "--model_name_or_path"),
    ):
        where = ["--output_dir", tmp_path / "out"]
        assert expected in refusal(recipe(name), flags[0], tmp_path / flags[1], *where)
    assert not (tmp_path / "out").exists()


# --- finetune_classifier --------------------------------------------------------------------------


def test_classifier_runs_with_its_defaults_under_accelerate_launch(tmp_path: Path) -> None:
    code, out, err = launch([*LAUNCH, RECIPES / "finetune_classifier.py", *SMALL], tmp_path)
    assert code == 0, err
    for said in ("accuracy before:", "accuracy after:", "9 labels", "first 5 layers frozen"):
        assert said in out
    assert re.search(r"^step 2 of 2: loss [\d.]+, scale 65536, skipped 0$", out, re.MULTILINE)
    assert "it/s" not in err  # a bar is for terminals
    result = tmp_path / "out" / "finetune_classifier"
    model = AutoModelForSequenceClassification.from_pretrained(result)
    assert sorted(model.config.id2label.values())[0] == "asyncio"
    batch = AutoTokenizer.from_pretrained(result)("Parse a mail header.", return_tensors="pt")
    assert model(**batch).logits.shape == (1, 9)


def test_a_refusal_ends_the_launch_with_an_error(tmp_path: Path) -> None:
    script = RECIPES / "finetune_classifier.py"
    code, _, err = launch([*LAUNCH, script, "--train_file", "nowhere.csv"], tmp_path)
    assert code != 0
    said = [line for line in err.splitlines() if "error" in line]
    assert said == ["finetune_classifier: error: no such file: nowhere.csv"]
    assert not (tmp_path / "out").exists()


def test_classifier_learns_from_a_file_and_replaces_its_result(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_rows(tmp_path / "own.csv", ROWS, text="words")
    held_out = write_rows(tmp_path / "held_out.jsonl", ROWS[:4], text="words")
    flags = ["--train_file", own, "--validation_file", held_out, "--text_column", "words"]
    for _ in range(2):
        run(recipe("finetune_classifier"), tmp_path / "mine", *SMALL, *flags)
        assert "16 training texts, 4 held out, 2 labels" in capsys.readouterr().out
    assert AutoConfig.from_pretrained(tmp_path / "mine").id2label == {0: "bad", 1: "good"}


def test_the_default_texts_are_split_fairly(recipe: Recipe) -> None:
    """No module and no text is in both splits, every label is, and none names its package."""
    classifier = recipe("finetune_classifier")
    data = classifier.standard_library(seed=0)
    train, held_out = data["train"], data["validation"]
    assert not set(train["module"]) & set(held_out["module"])
    assert not set(train["text"]) & set(held_out["text"])
    assert len(set(train["text"])) == len(train)
    labels = [Counter(split["label"]) for split in (train, held_out)]
    assert labels[0].keys() == labels[1].keys()
    assert min(labels[0].values()) >= 50
    assert min(labels[1].values()) >= 10
    assert max(labels[1].values()) <= 2 * len(held_out) / len(labels[1])
    for row in (*train, *held_out):
        package = row["module"].split(".")[0]
        assert not re.search(rf"\b{package}\b", row["text"], re.IGNORECASE), row
    # The seed decides.
    again = classifier.standard_library(seed=0)
    assert {k: v.to_list() for k, v in again.items()} == {k: v.to_list() for k, v in data.items()}
    other = classifier.standard_library(seed=1)
    assert set(other["validation"]["module"]) != set(held_out["module"])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.csv", "", "is empty"),
        ("broken.jsonl", "{not json\n", "cannot be read"),
        ("one.csv", "text,label\na,x\nb,x\n", "only one label: 'x'"),
        ("gap.csv", "text,label\na,x\n,y\n", "1 rows lack a text or a label, the first is row 2"),
        ("own.parquet", "PAR1", "expected a name that ends in"),
        ("own.csv", "body,label\na,x\n", "no column 'text', only: body, label"),
    ],
)
def test_bad_train_files(
    recipe: Recipe, tmp_path: Path, name: str, content: str, expected: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    flags = ["--train_file", tmp_path / name, "--output_dir", tmp_path / "out"]
    assert expected in refusal(recipe("finetune_classifier"), *flags)
    assert not (tmp_path / "out").exists()


def test_unknown_held_out_labels_are_named(recipe: Recipe, tmp_path: Path) -> None:
    own = write_rows(tmp_path / "own.csv", ROWS)
    strange = write_rows(tmp_path / "held.jsonl", [("a", "ugly"), ("b", "good"), ("c", "odd")])
    flags = ["--train_file", own, "--validation_file", strange, "--output_dir", tmp_path / "out"]
    assert "does not have: odd, ugly" in refusal(recipe("finetune_classifier"), *flags)


def test_own_file_without_held_out_texts_is_split_and_words_stay_words(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Also those that pandas takes for gaps."""
    classifier = recipe("finetune_classifier")
    own = write_rows(tmp_path / "own.csv", [*ROWS[:-1], ("NA", "bad")])
    args = classifier.parse_args(["--train_file", str(own)])
    train, held_out, names = classifier.load_data(args)
    assert (len(train), len(held_out), names) == (12, 4, ["bad", "good"])
    assert {*train["text"], *held_out["text"]} == {words for words, _ in ROWS[:-1]} | {"NA"}


# --- trainer_swap ---------------------------------------------------------------------------------


def test_trainer_swap_runs_and_its_model_loads(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    run(recipe("trainer_swap"), tmp_path / "out", *FEW)
    said = capsys.readouterr().out
    assert "held-out loss before:" in said
    assert "held-out loss after:" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer("The while statement", return_tensors="pt")
    assert model(input_ids=batch["input_ids"]).logits.shape[-1] == len(tokenizer)
    assert tokenizer.decode(batch["input_ids"][0]) == "The while statement"
    flags = ["--train_file", text, "--model_name_or_path", tmp_path / "out", "--block_size", "16"]
    run(recipe("trainer_swap"), tmp_path / "out", *FEW, *flags)  # into the same directory


def test_trainer_swap_adds_one_line() -> None:
    source = (RECIPES / "trainer_swap.py").read_text(encoding="utf-8")
    code = source.split('"""', 2)[2]
    assert code.count("attach(") == 1
    assert code.count("accel_scaler") == 1


# --- gan ------------------------------------------------------------------------------------------


def test_gan_comes_closer_to_pictures_it_has_not_seen(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gan = recipe("gan")
    found = json.loads(run(gan, tmp_path, "--max_steps", 60))
    assert found["distance_after"] < 0.6 * found["distance_before"]
    assert found["distance_of_real"] < found["distance_after"]
    said = capsys.readouterr()
    assert "scaler: 120 windows" in said.out  # two optimizers, a window each
    for shown in ("critic=", "generator=", "scale=", "skips="):
        assert shown in said.err

    # The numbers and the picture are those of the weights that were saved.
    args = gan.parse_args([])
    generator = gan.make_generator(args).eval()
    generator.load_state_dict(load_file(tmp_path / "model.safetensors"))
    _, held_out = gan.load_pictures(args)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        samples = generator(torch.randn(len(held_out), args.latent, generator=random))
    assert gan.distance(samples, held_out) == pytest.approx(found["distance_after"], rel=0.02)
    picture = numpy.asarray(Image.open(tmp_path / "samples.png"))[1::3, 1::3]
    assert picture.shape == (8 * 16, 8 * 16)
    first = (samples[0, 0].numpy() + 1) * 127.5
    assert numpy.abs(picture[:16, :16] - first).mean() < 3


def test_gan_reads_image_files_and_arrays_alike(recipe: Recipe, tmp_path: Path) -> None:
    gan = recipe("gan")
    pictures = numpy.random.default_rng(0).integers(0, 256, (130, 16, 16), dtype="uint8")
    (tmp_path / "images" / "below").mkdir(parents=True)
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / "images" / "below" / f"{number:03}.png")
    numpy.savez(tmp_path / "grey.npz", images=pictures)
    numpy.savez(tmp_path / "float.npz", pictures.astype("float32") / 255)
    numpy.savez(tmp_path / "colour.npz", numpy.repeat(pictures[..., None], 3, axis=-1))
    expected = torch.from_numpy(pictures).float() / 255
    loaded = [gan.from_directory(tmp_path / "images", 16)]
    loaded += [gan.from_file(tmp_path / f"{n}.npz", 16) for n in ("grey", "float", "colour")]
    for each in loaded:
        torch.testing.assert_close(each, expected)
    args = gan.parse_args(["--data_dir", str(tmp_path / "images")])
    learned, held_out = gan.load_pictures(args)
    assert (learned.shape, held_out.shape) == ((66, 1, 16, 16), (64, 1, 16, 16))
    assert (learned.amin(), learned.amax()) == (-1, 1)


def test_gan_refuses_pictures_that_are_none(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    few = numpy.zeros((5, 8, 8), dtype="uint8")
    numpy.savez(tmp_path / "few.npz", few)
    numpy.savez(tmp_path / "two.npz", a=few, b=few)
    numpy.savez(tmp_path / "range.npz", few + 7.0)
    for flags, expected in (
        (["--data_dir", "broken"], "a.png cannot be read"),
        (["--data_dir", "nowhere"], "is not a directory"),
        (["--data_file", "broken.npz"], "broken.npz cannot be read"),
        (["--data_file", "few.npz"], "found 5 pictures, expected at least 128"),
        (["--data_file", "two.npz"], "no array 'images', but: a, b"),
        (["--data_file", "range.npz"], "expected values from 0 to 1"),
    ):
        said = refusal(recipe("gan"), flags[0], tmp_path / flags[1], "--output_dir", out)
        assert expected in said
    assert not out.exists()


# --- fp16_weights ---------------------------------------------------------------------------------


def test_fp16_weights_train_beside_fp32_weights_and_masters_are_in_the_checkpoint(
    recipe: Recipe, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", [*TINY, "--train_file", text]
    found = json.loads(run(recipe("fp16_weights"), out, *flags, "--max_steps", 4))
    other = found["fp32_weights"]
    assert found["loss_after"] < found["loss_before"]
    assert found["loss_before"] == pytest.approx(other["loss_before"], rel=2e-3)
    assert found["loss_after"] == pytest.approx(other["loss_after"], rel=2e-2)
    said = capsys.readouterr().out
    for line in ("fp16, offload=none, sync", "fp32, stepped in place", "scaler: 4 windows"):
        assert line in said
    # Alone in its process, the other run takes at least what its weights and AdamW do.
    weights = load_file(out / "model.safetensors")
    size = sum(each.numel() for each in weights.values())
    assert other["peak_mib"] > 16 * size / 2**20

    assert {each.dtype for each in weights.values()} == {torch.float16}
    saved = torch.load(out / "checkpoint" / "optimizer.bin", weights_only=True)["state"]
    masters = [entry["master"] for entry in saved.values()]
    assert {each.dtype for each in masters} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.half())
    assert any(not torch.equal(master.half().float(), master) for master in masters)

    # The result is a model to go on from.
    again = ["--model_name_or_path", out, "--no_comparison", "--max_steps", 1]
    second = json.loads(run(recipe("fp16_weights"), tmp_path / "second", *flags, *again))
    assert second["loss_before"] == pytest.approx(found["loss_after"], rel=1e-3)
    assert second["fp32_weights"] is None


def test_a_resumed_run_with_fp16_weights_ends_like_one_that_was_not_interrupted(
    recipe: Recipe, tmp_path: Path, text: Path
) -> None:
    flags = [*TINY, "--train_file", text, "--no_comparison"]
    flags += ["--step_mode", "overlap", "--offload", "cpu"]
    resume = ["--resume_from_checkpoint", tmp_path / "half" / "checkpoint"]
    run(recipe("fp16_weights"), tmp_path / "whole", *flags, "--max_steps", 4)
    run(recipe("fp16_weights"), tmp_path / "half", *flags, "--max_steps", 2)
    run(recipe("fp16_weights"), tmp_path / "rest", *flags, *resume, "--max_steps", 4)
    ends = []
    for out in (tmp_path / "whole", tmp_path / "rest"):
        state = torch.load(out / "checkpoint" / "optimizer.bin", weights_only=True)["state"]
        tensors = load_file(out / "model.safetensors")
        ends.append(tensors | {f"{i}.{k}": v for i, e in state.items() for k, v in e.items()})
    assert ends[0].keys() == ends[1].keys()
    assert any("master" in name for name in ends[0])
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    flags += [*resume, "--output_dir", tmp_path / "rest"]
    said = refusal(recipe("fp16_weights"), *flags, "--max_steps", 2)
    assert "has done 2 steps, --max_steps is 2" in said
    flags[flags.index("--resume_from_checkpoint") + 1] = tmp_path
    assert "no optimizer.bin there" in refusal(recipe("fp16_weights"), *flags)


# --- find_overflow --------------------------------------------------------------------------------


def test_the_layer_that_was_spoilt_is_found_and_the_run_heals_itself(
    recipe: Recipe, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--max_steps", 12, "--max_consecutive_skips", 3, "--train_file", text]
    flags += ["--spoil", SPOILT, "--factor", 4e6]
    flags += ["--learning_rate", 2e-3]
    runs = json.loads(run(recipe("find_overflow"), tmp_path / "out", *flags))["gpt2"]
    fp16, healed, kept, fp32 = (runs[name] for name in ("fp16", "healed", "kept", "fp32"))
    assert f"forward of {SPOILT} (Conv1D)" in fp16["began"]
    assert fp16["skips"] == fp16["steps"] == 4
    assert "max_consecutive_skips=3" in fp16["ended_by"]
    assert fp16["healed"] == kept["healed"] == []
    assert healed["healed"] == [SPOILT]
    assert [each["ended_by"] for each in (healed, kept, fp32)] == [None] * 3
    assert healed["steps"] == kept["steps"] == fp32["steps"] == 12
    assert kept["skips"] <= healed["skips"] - 1
    gain = fp16["loss"] - fp32["loss"]
    assert gain > 0.2
    for each in (healed, kept):
        assert fp16["loss"] - each["loss"] > 0.5 * gain

    said = capsys.readouterr().out
    assert fp16["began"] in said
    assert f'fp32_modules=["{SPOILT}"]' in said
    command = said.strip().splitlines()[-1].split()
    assert command[:2] == ["accel-scaler", "report"]
    assert command[2:-2] == [str(tmp_path / "out" / "healed.jsonl")]
    files = [tmp_path / "out" / f"{name}.jsonl" for name in ("fp16", "healed", "kept", "fp32")]
    starts = [json.loads(path.read_text().splitlines()[0]) for path in files]
    assert [start["precision"] for start in starts] == ["fp16", "fp16", "fp16", "no"]
    assert starts[2]["settings"]["fp32_modules"] == [SPOILT]
    windows = [json.loads(line) for line in files[0].read_text().splitlines()]
    firsts = [line["first"] for line in windows if "first" in line]
    assert [(each["where"], each["module"]) for each in firsts] == [("forward", SPOILT)]
    windows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [line["healed"] for line in windows if "healed" in line] == [[SPOILT]]
    assert command_line([*command[1:-2], "--text"]) == 0
    assert SPOILT in capsys.readouterr().out

    # A second run replaces the files, which the scaler itself would append to.
    run(recipe("find_overflow"), tmp_path / "out", *flags)
    kinds = Counter(json.loads(line)["kind"] for line in files[3].read_text().splitlines())
    assert (kinds["start"], kinds["window"]) == (1, 12)


def test_a_run_in_which_no_module_is_at_fault_ends_with_an_error(
    recipe: Recipe, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*TINY, "--max_steps", 2, "--factor", 1, "--train_file", text]
    flags += ["--output_dir", tmp_path / "out"]
    said = refusal(recipe("find_overflow"), *flags)
    assert "nothing overflowed in 2 steps of fp16" in said
    # Nor is a scale that is too high the fault of a module.
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(2.0**60))
    said = refusal(recipe("find_overflow"), *flags)
    assert "2 of 2 steps of fp16 overflowed, and no module was at fault" in said
    monkeypatch.delenv("ACCEL_SCALER_INIT_SCALE")
    said = refusal(recipe("find_overflow"), *flags, "--spoil", "transformer.h")
    assert "--spoil transformer.h: the model has no such module with a weight" in said


def test_one_of_the_sick_models_by_its_name(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_HEAL", "true")  # else the first run would heal, too
    out, flags = tmp_path / "out", ["--model", "summed_loss"]
    runs = json.loads(run(recipe("find_overflow"), out, *flags))["summed_loss"]
    assert runs["healed"]["healed"] == ["error"]
    assert runs["healed"]["loss"] == pytest.approx(runs["fp32"]["loss"], rel=0.01)
    assert runs["kept"]["loss"] == pytest.approx(runs["fp32"]["loss"], rel=0.01)
    assert runs["kept"]["skips"] == 0
    assert runs["fp16"]["loss"] > 1.5 * runs["fp32"]["loss"]
    said = capsys.readouterr()
    assert "scale=" in said.err
    assert "skips=" in said.err
    with pytest.raises(SystemExit):
        recipe("find_overflow").main(["--model", "nowhere"])
    assert "invalid choice: 'nowhere'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recipe("find_overflow").main(["--all", "--model_name_or_path", "gpt2"])
    assert "not allowed with" in capsys.readouterr().err
    said = refusal(recipe("find_overflow"), "--all", "--spoil", "0", "--output_dir", tmp_path / "a")
    assert "--train_file and --spoil are for a language model" in said
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_all_sick_models_give_a_row_each(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--all", "--max_steps", 8, "--max_consecutive_skips", 2]
    result = json.loads(run(recipe("find_overflow"), tmp_path / "out", *flags))
    names = list(recipe("sick_models").SICK)
    assert list(result) == names
    said = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(said) if line.endswith("kept in fp32"))
    assert [line.split()[0] for line in said[start + 1 : start + 13]] == names
    for name in names:
        assert sorted(path.name for path in (tmp_path / "out" / name).iterdir()) == [
            "fp16.jsonl", "fp32.jsonl", "healed.jsonl", "kept.jsonl",
        ]  # fmt: skip
