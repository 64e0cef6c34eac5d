"""The recipes for a GAN, fp16 weights and a layer that overflows: short runs, and their claims.

They run in this process. What they refuse is one line, said before anything is written.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from places import ROOT
from safetensors.torch import load_file
from torch import nn

from accel_scaler.cli import main as command_line

RECIPES = ROOT / "recipes"
NAMES = ("gan", "fp16_weights", "find_overflow")
TINY = ["--per_device_batch_size", "2", "--block_size", "16", "--max_eval_samples", "4"]
SPOILT = "transformer.h.1.mlp.c_proj"  # not the default, so not one that the recipe knows


@pytest.fixture(scope="module")
def recipes() -> Iterator[dict[str, ModuleType]]:
    """The recipes as modules, found as their own directory would find them."""
    sys.path.insert(0, str(RECIPES))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(RECIPES))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def few_threads(one_thread: None) -> None:
    """A team of threads on a busy machine spends its time waiting."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file that is quickly read, and learned."""
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven\n\n" * 60, encoding="utf-8")
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def run(recipe: ModuleType, out: Path, *args: object) -> Any:
    """Run it, and return what its result file says."""
    recipe.main([str(arg) for arg in ("--output_dir", out, *args)])
    return read(out / recipe.RESULT_FILE)


def refusal(recipe: ModuleType, *args: object) -> str:
    """The one line that a run ends with, at once or later."""
    with pytest.raises(SystemExit) as ended:
        recipe.main([str(arg) for arg in args])
    message = ended.value.code
    assert isinstance(message, str), "not a message: exit status 0, or argparse"
    assert "\n" not in message
    assert message.startswith(f"{recipe.__name__}: error: ")
    return message


# --- gan ------------------------------------------------------------------------------------------


def test_gan_comes_closer_to_pictures_it_has_not_seen(
    recipes: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(recipes["gan"], tmp_path, "--max_steps", 60)
    assert found["distance_after"] < 0.6 * found["distance_before"]
    assert found["distance_of_real"] < found["distance_after"]
    said = capsys.readouterr()
    assert "scaler: 120 windows" in said.out  # two optimizers, a window each
    for shown in ("critic=", "generator=", "scale=", "skips="):
        assert shown in said.err

    # The numbers and the picture are those of the weights that were saved.
    gan = recipes["gan"]
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
    real = numpy.asarray(Image.open(tmp_path / "real.png"))[1::3, 1::3]
    assert numpy.abs(real[:16, :16] - (held_out[0, 0].numpy() + 1) * 127.5).max() <= 0.5


def test_gan_computes_the_same_numbers_with_its_steps_on_another_thread(
    recipes: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipes["gan"], tmp_path / "sync", "--max_steps", 6)
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", "overlap")
    run(recipes["gan"], tmp_path / "overlap", "--max_steps", 6)
    sync, overlap = (
        load_file(tmp_path / mode / "model.safetensors") for mode in ("sync", "overlap")
    )
    assert all(torch.equal(sync[name], overlap[name]) for name in sync)


def test_the_distance_is_the_root_mean_square_over_directions_one_by_one(
    recipes: dict[str, ModuleType],
) -> None:
    distance = recipes["gan"].distance
    some, others = torch.randn(40, 1, 4, 4), torch.rand(50, 1, 4, 4) * 2
    along = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    squares = []
    for direction in along.T:
        unit = direction / direction.norm()
        a = sorted(float(picture.flatten() @ unit) for picture in some)
        b = sorted(float(picture.flatten() @ unit) for picture in others[:40])
        squares += [(x - y) ** 2 for x, y in zip(a, b, strict=True)]
    assert distance(some, others) == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=1e-4)
    assert distance(some, some.flip(0)) < 1e-6
    alike = some[:1].expand(40, -1, -1, -1)  # a generator that has collapsed
    assert distance(alike, some) > distance(torch.randn(40, 1, 4, 4), some)


def test_gan_reads_image_files_and_arrays_alike(
    recipes: dict[str, ModuleType], tmp_path: Path
) -> None:
    gan = recipes["gan"]
    pictures = numpy.random.default_rng(0).integers(0, 256, (130, 16, 16), dtype="uint8")
    (tmp_path / "images" / "below").mkdir(parents=True)
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / "images" / "below" / f"{number:03}.png")
    (tmp_path / "images" / "notes.txt").write_text("no picture", encoding="utf-8")
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


def test_gan_refuses_pictures_that_are_none(recipes: dict[str, ModuleType], tmp_path: Path) -> None:
    gan, out = recipes["gan"], tmp_path / "out"
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    few = numpy.zeros((5, 8, 8), dtype="uint8")
    numpy.savez(tmp_path / "few.npz", few)
    numpy.savez(tmp_path / "two.npz", a=few, b=few)
    numpy.savez(tmp_path / "flat.npz", few[0])
    numpy.savez(tmp_path / "range.npz", few + 7.0)
    for flags, expected in (
        (["--data_dir", "empty"], "has no image files"),
        (["--data_dir", "broken"], "a.png cannot be read"),
        (["--data_dir", "nowhere"], "is not a directory"),
        (["--data_file", "nowhere.npz"], "no such file"),
        (["--data_file", "broken.npz"], "broken.npz cannot be read"),
        (["--data_file", "few.npz"], "found 5 pictures, expected at least 128"),
        (["--data_file", "two.npz"], "no array 'images', but: a, b"),
        (["--data_file", "flat.npz"], "got uint8 of shape (8, 8)"),
        (["--data_file", "range.npz"], "expected values from 0 to 1"),
    ):
        said = refusal(gan, flags[0], tmp_path / flags[1], "--output_dir", out)
        assert expected in said
    assert not out.exists()


# --- fp16_weights ---------------------------------------------------------------------------------


def test_fp16_weights_train_beside_fp32_weights_and_masters_are_in_the_checkpoint(
    recipes: dict[str, ModuleType],
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, flags = tmp_path / "out", [*TINY, "--train_file", text]
    found = run(recipes["fp16_weights"], out, *flags, "--max_steps", 4)
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
    assert sum(each.numel() for each in masters) == size
    assert f"{size} float32 master weights" in said
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.half())
    assert any(not torch.equal(master.half().float(), master) for master in masters)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size

    # The result is a model to go on from.
    again = ["--model_name_or_path", out, "--no_comparison", "--max_steps", 1]
    second = run(recipes["fp16_weights"], tmp_path / "second", *flags, *again)
    assert second["loss_before"] == pytest.approx(found["loss_after"], rel=1e-3)
    assert second["fp32_weights"] is None


@pytest.mark.parametrize(("mode", "offload"), [("sync", "none"), ("overlap", "cpu")])
def test_a_resumed_run_with_fp16_weights_ends_like_one_that_was_not_interrupted(
    recipes: dict[str, ModuleType], tmp_path: Path, text: Path, mode: str, offload: str
) -> None:
    recipe = recipes["fp16_weights"]
    flags = [*TINY, "--train_file", text, "--no_comparison"]
    flags += ["--step_mode", mode, "--offload", offload]
    whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
    run(recipe, whole, *flags, "--max_steps", 4)
    run(recipe, half, *flags, "--max_steps", 2)
    flags += ["--resume_from_checkpoint", half / "checkpoint", "--max_steps"]
    run(recipe, rest, *flags, 4)
    ends = []
    for out in (whole, rest):
        state = torch.load(out / "checkpoint" / "optimizer.bin", weights_only=True)["state"]
        tensors = load_file(out / "model.safetensors")
        tensors |= {f"{i}.{k}": v for i, entry in state.items() for k, v in entry.items()}
        ends.append(tensors)
    assert ends[0].keys() == ends[1].keys()
    assert any("master" in name for name in ends[0])
    different = [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])]
    assert not different
    said = refusal(recipe, *flags, 2, "--output_dir", rest)
    assert "has done 2 steps, --max_steps is 2" in said


# --- find_overflow --------------------------------------------------------------------------------


def test_the_layer_that_was_spoilt_is_found_and_the_run_is_mended(
    recipes: dict[str, ModuleType],
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*TINY, "--max_steps", 12, "--max_consecutive_skips", 3, "--train_file", text]
    flags += ["--spoil", SPOILT, "--factor", 4e6]
    found = run(recipes["find_overflow"], tmp_path / "out", *flags)
    assert found["kept_in_fp32"] == [SPOILT]
    fp16, fixed, fp32 = (found[name] for name in ("fp16", "fixed", "fp32"))
    assert fp16["skips"] == 4
    assert "max_consecutive_skips=3" in fp16["ended_by"]
    assert fp16["losses"][0] == fp16["losses"][1]
    assert fixed["ended_by"] is None
    assert fixed["skips"] <= 3  # a scale that came down, if any
    assert fp32["skips"] == 0
    gain = fp32["losses"][0] - fp32["losses"][1]
    assert gain > 0.2
    assert fixed["losses"][0] - fixed["losses"][1] > 0.5 * gain

    said = capsys.readouterr().out
    assert f"kept in fp32: {SPOILT}" in said
    assert "held-out loss before" in said
    command = said.strip().splitlines()[-1].split()
    assert command[:2] == ["accel-scaler", "report"]
    files = [Path(part) for part in command[2:-2]]
    starts = [json.loads(path.read_text().splitlines()[0]) for path in files]
    assert [start["precision"] for start in starts] == ["fp16", "fp16", "no"]
    windows = [json.loads(line) for line in files[0].read_text().splitlines()]
    firsts = [line["first"] for line in windows if line["kind"] == "window"]
    assert {(each["where"], each["module"]) for each in firsts} == {("forward", SPOILT)}
    assert command_line([*command[1:-2], "--text"]) == 0
    assert SPOILT in capsys.readouterr().out

    # A second run replaces the files, which the scaler itself would append to.
    before = len(files[2].read_text().splitlines())
    run(recipes["find_overflow"], tmp_path / "out", *flags)
    assert len(files[2].read_text().splitlines()) == before


def test_a_run_in_which_nothing_overflows_ends_with_an_error(
    recipes: dict[str, ModuleType], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*TINY, "--max_steps", 2, "--factor", 1, "--train_file", text]
    flags += ["--output_dir", tmp_path / "out"]
    said = refusal(recipes["find_overflow"], *flags)
    assert "nothing overflowed in 2 steps of fp16" in said
    # Nor is a scale that is too high the fault of a layer.
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", str(2.0**60))
    said = refusal(recipes["find_overflow"], *flags)
    assert "2 of 2 steps of fp16 overflowed, none of them in a forward" in said


def test_a_module_kept_in_fp32_computes_what_it_does_without_autocast(
    recipes: dict[str, ModuleType],
) -> None:
    module = nn.Linear(8, 4)
    with torch.no_grad():
        module.weight.fill_(3e4)
    given = torch.ones(2, 8)
    expected = module(given)
    with torch.autocast("cpu", torch.float16):
        assert not module(given).isfinite().all()
    recipes["find_overflow"].keep_in_fp32(module, "cpu")
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(module(given.half()), expected)
        assert torch.equal(module(input=given.half()), expected)
    small = nn.Linear(8, 4).half()
    recipes["find_overflow"].keep_in_fp32(small, "cpu")
    assert small(given.half()).dtype is torch.float32


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_of_another_origin_is_left_alone(
    recipes: dict[str, ModuleType], tmp_path: Path, name: str
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    said = refusal(recipes[name], "--output_dir", tmp_path)
    assert "another origin" in said
    assert "--overwrite_output_dir" in said
    assert "is a file" in refusal(recipes[name], "--output_dir", tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_texts_and_models_that_are_not_there_are_named(
    recipes: dict[str, ModuleType], tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty.txt").write_text("\n\n", encoding="utf-8")
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    for flags, expected in (
        (["--train_file", "nowhere.txt"], "no such file"),
        (["--train_file", "empty.txt"], "empty.txt is empty"),
        (["--train_file", "short.txt"], "the text has 12 tokens"),
        (["--model_name_or_path", "nowhere"], "--model_name_or_path"),
    ):
        said = refusal(recipes[name], flags[0], tmp_path / flags[1], "--output_dir", out)
        assert expected in said
    assert not out.exists()


def test_a_module_or_checkpoint_that_is_not_there_is_named(
    recipes: dict[str, ModuleType], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = refusal(recipes["find_overflow"], "--spoil", "transformer.h", "--output_dir", out)
    assert "--spoil transformer.h: the model has no such module with a weight" in said
    flags = ["--resume_from_checkpoint", tmp_path, "--output_dir", out]
    assert "no optimizer.bin there" in refusal(recipes["fp16_weights"], *flags)
    assert not out.exists()
