"""The recipes: run as a user runs them, offline, for a few steps; and what they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from places import ROOT
from safetensors.torch import load_file

RECIPES = ROOT / "recipes"
CONFIG = ROOT / "accelerate_configs" / "cpu_fp16.yaml"
FEW = ["--max_steps", "2", "--max_eval_samples", "8"]
SMALL = [*FEW, "--per_device_batch_size", "2", "--max_length", "16"]


def launch(recipe: str, cwd: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a recipe with `accelerate launch`; -q spares us the launcher's own traceback."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "-q", "--config_file", CONFIG]
    # The recipes import accel_scaler; the tests also run from a checkout that is not installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    # Two OpenMP threads that share busy cores spend most of the time waiting for each other.
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [str(part) for part in (*command, RECIPES / recipe, *args)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def classifier() -> Any:
    """The recipe as a module, found as its own directory would find it."""
    pytest.importorskip("datasets")
    sys.path.insert(0, str(RECIPES))
    try:
        import finetune_classifier

        yield finetune_classifier
    finally:
        sys.path.remove(str(RECIPES))
        for name in ("finetune_classifier", "stdlib_docstrings"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def swap(classifier: ModuleType) -> ModuleType:
    sys.path.insert(0, str(RECIPES))
    try:
        import trainer_swap
    finally:
        sys.path.remove(str(RECIPES))
    return trainer_swap


def write_rows(path: Path, rows: list[tuple[str, str]], text: str = "text") -> Path:
    """Write rows as CSV or as JSON lines, by the name of the file."""
    if path.suffix == ".csv":
        lines = [f"{text},label", *(f'"{words}",{label}' for words, label in rows)]
    else:
        lines = [json.dumps({text: words, "label": label}) for words, label in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


ROWS = [(f"a {kind} thing, number {n}", kind) for n in range(8) for kind in ("good", "bad")]


# --- whole runs -----------------------------------------------------------------------------------


def test_classifier_runs_with_its_defaults_and_runs_again(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    first = launch("finetune_classifier.py", tmp_path, *SMALL)
    assert first.returncode == 0, first.stderr
    for said in ("accuracy before:", "accuracy after:", "9 labels", "first 5 layers frozen"):
        assert said in first.stdout, first.stdout
    assert "scale=" in first.stderr
    assert "skipped=" in first.stderr

    out = tmp_path / "out" / "finetune_classifier"
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert sorted(model.config.id2label.values())[0] == "asyncio"
    assert model.config.num_labels == 9
    batch = AutoTokenizer.from_pretrained(out)("Parse a mail header.", return_tensors="pt")
    assert model(**batch).logits.shape == (1, 9)

    # The default directory now holds a result of ours: a second run replaces it.
    again = launch("finetune_classifier.py", tmp_path, *SMALL)
    assert again.returncode == 0, again.stderr
    accuracies = [line for line in first.stdout.splitlines() if "accuracy before" in line]
    assert accuracies[0] in again.stdout  # the same seed


def test_classifier_learns_from_a_file(tmp_path: Path) -> None:
    from transformers import AutoConfig

    own = write_rows(tmp_path / "own.csv", ROWS, text="words")
    held_out = write_rows(tmp_path / "held_out.jsonl", ROWS[:4], text="words")
    flags = ["--train_file", own, "--validation_file", held_out, "--text_column", "words"]
    ran = launch("finetune_classifier.py", tmp_path, *SMALL, *flags, "--output_dir", "mine")
    assert ran.returncode == 0, ran.stderr
    assert "16 training texts, 4 held out, 2 labels" in ran.stdout
    assert AutoConfig.from_pretrained(tmp_path / "mine").id2label == {0: "bad", 1: "good"}


def test_trainer_swap_runs_and_its_model_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ran = launch("trainer_swap.py", tmp_path, *FEW)
    assert ran.returncode == 0, ran.stderr
    for said in ("held-out loss before:", "held-out loss after:", "saved to out/trainer_swap"):
        assert said in ran.stdout, ran.stdout
    out = tmp_path / "out" / "trainer_swap"
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "The while statement"
    batch = tokenizer(text, return_tensors="pt")
    assert model(input_ids=batch["input_ids"]).logits.shape[-1] == len(tokenizer)
    assert tokenizer.decode(batch["input_ids"][0]) == text

    own = tmp_path / "own.txt"
    own.write_text("one two three four five six seven\n\n" * 40, encoding="utf-8")
    flags = ["--train_file", own, "--model_name_or_path", out, "--block_size", "16"]
    again = launch("trainer_swap.py", tmp_path, *FEW, *flags)  # into the same directory
    assert again.returncode == 0, again.stderr


def test_trainer_swap_adds_one_line() -> None:
    source = (RECIPES / "trainer_swap.py").read_text(encoding="utf-8")
    code = source.split('"""', 2)[2]
    assert code.count("attach(") == 1
    assert code.count("accel_scaler") == 1


@pytest.mark.parametrize("which", ["classifier", "swap"])
def test_a_step_mode_in_the_environment_changes_no_number(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    which: str,
) -> None:
    """``ACCEL_SCALER_STEP_MODE=overlap`` with the recipe as it is; in this process, to be quick."""
    recipe = request.getfixturevalue(which)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    flags = SMALL if which == "classifier" else FEW
    said = {}
    for mode in ("sync", "overlap"):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
        recipe.main([*flags, "--output_dir", str(tmp_path / mode)])
        lines = capsys.readouterr().out.splitlines()
        said[mode] = [re.sub(r" in \d+ s", "", line) for line in lines if "held-out" in line]
    assert len(said["sync"]) == 2
    assert said["overlap"] == said["sync"]
    saved = [load_file(tmp_path / mode / "model.safetensors") for mode in said]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.parametrize("recipe", ["finetune_classifier.py", "trainer_swap.py"])
def test_a_refusal_ends_the_launch_with_an_error(tmp_path: Path, recipe: str) -> None:
    before = sorted(tmp_path.iterdir())
    ran = launch(recipe, tmp_path, "--train_file", "nowhere.csv")
    assert ran.returncode != 0
    said = [line for line in ran.stderr.splitlines() if "error" in line]
    assert said == [f"{recipe.removesuffix('.py')}: error: no such file: nowhere.csv"]
    assert sorted(tmp_path.iterdir()) == before


# --- the default data set -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docstrings(classifier: ModuleType) -> Any:
    return classifier.standard_library(seed=0)


def test_no_module_and_no_text_is_in_both_splits(docstrings: Any) -> None:
    train, held_out = docstrings["train"], docstrings["validation"]
    assert not set(train["module"]) & set(held_out["module"])
    assert not set(train["text"]) & set(held_out["text"])
    assert len(set(train["text"])) == len(train)


def test_every_label_is_in_both_splits_and_none_rules(docstrings: Any) -> None:
    train, held_out = (
        Counter(docstrings["train"]["label"]),
        Counter(docstrings["validation"]["label"]),
    )
    assert train.keys() == held_out.keys()
    assert len(train) >= 8
    assert min(train.values()) >= 50
    assert min(held_out.values()) >= 10
    assert max(held_out.values()) <= 2 * sum(held_out.values()) / len(held_out)


def test_the_texts_do_not_name_their_package(docstrings: Any) -> None:
    for split in docstrings.values():
        for row in split:
            package = row["module"].split(".")[0]
            assert not re.search(rf"\b{package}\b", row["text"], re.IGNORECASE), row


def test_the_seed_decides_the_split(classifier: ModuleType, docstrings: Any) -> None:
    again = classifier.standard_library(seed=0)
    assert {k: v.to_list() for k, v in again.items()} == {
        k: v.to_list() for k, v in docstrings.items()
    }
    other = classifier.standard_library(seed=1)
    assert set(other["validation"]["module"]) != set(docstrings["validation"]["module"])
    assert not set(other["train"]["module"]) & set(other["validation"]["module"])


# --- what is refused ------------------------------------------------------------------------------


def refusal(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, *args: object) -> str:
    """Run main in this process with no way to load a model; return the one line it ends with."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the input was refused")

    monkeypatch.setattr(recipe, "load_model", too_late)
    with pytest.raises(SystemExit) as ended:
        recipe.main([str(arg) for arg in args])
    message = ended.value.code
    assert isinstance(message, str), "not a message: exit status 0, or argparse"
    assert "\n" not in message
    return message


def test_missing_column_is_named_with_those_there(
    classifier: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = write_rows(tmp_path / "own.csv", ROWS, text="body")
    out = tmp_path / "out"
    said = refusal(classifier, monkeypatch, "--train_file", own, "--output_dir", out)
    assert "no column 'text'" in said
    assert "body, label" in said
    assert "--text_column" in said
    assert not out.exists()


def test_unknown_held_out_labels_are_named(
    classifier: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = write_rows(tmp_path / "own.csv", ROWS)
    strange = write_rows(tmp_path / "held.jsonl", [("a", "ugly"), ("b", "good"), ("c", "odd")])
    flags = ["--train_file", own, "--validation_file", strange, "--output_dir", tmp_path / "out"]
    assert "does not have: odd, ugly" in refusal(classifier, monkeypatch, *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.csv", "", "is empty"),
        ("broken.jsonl", "{not json\n", "cannot be read"),
        ("one.csv", "text,label\na,x\nb,x\n", "only one label: 'x'"),
        ("gap.csv", "text,label\na,x\n,y\n", "1 rows lack a text or a label, the first is row 2"),
        ("own.parquet", "PAR1", "expected a name that ends in"),
    ],
)
def test_bad_train_files(
    classifier: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    content: str,
    expected: str,
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    flags = ["--train_file", tmp_path / name, "--output_dir", tmp_path / "out"]
    assert expected in refusal(classifier, monkeypatch, *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["classifier", "swap"])
def test_a_directory_of_another_origin_is_left_alone(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str
) -> None:
    recipe = request.getfixturevalue(which)
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    said = refusal(recipe, monkeypatch, "--output_dir", tmp_path)
    assert "another origin" in said
    assert "--overwrite_output_dir" in said
    file = tmp_path / "thesis.txt"
    assert "is a file" in refusal(recipe, monkeypatch, "--output_dir", file)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    assert file.read_text(encoding="utf-8") == "years of work"


def test_a_model_that_is_not_there(
    classifier: ModuleType, swap: ModuleType, tmp_path: Path
) -> None:
    for recipe, source in ((classifier, ["x"]), (swap, ["x"])):
        args = recipe.parse_args(["--model_name_or_path", str(tmp_path / "nowhere")])
        with pytest.raises(SystemExit, match="--model_name_or_path"):
            recipe.load_model(args, source)


@pytest.mark.parametrize("name", ["own.csv", "own.jsonl"])
def test_own_file_without_held_out_texts_is_split(
    classifier: ModuleType, tmp_path: Path, name: str
) -> None:
    own = write_rows(tmp_path / name, ROWS)
    args = classifier.parse_args(["--train_file", str(own)])
    train, held_out, names = classifier.load_data(args)
    assert (len(train), len(held_out), names) == (12, 4, ["bad", "good"])
    assert not set(train["text"]) & set(held_out["text"])


def test_words_that_pandas_takes_for_gaps_stay_words(
    classifier: ModuleType, tmp_path: Path
) -> None:
    own = write_rows(tmp_path / "own.csv", [("NA", "None"), ("null", "yes")])
    rows = classifier.read_file(own, classifier.parse_args(["--train_file", str(own)]))
    assert rows.to_list() == [{"text": "NA", "label": "None"}, {"text": "null", "label": "yes"}]
