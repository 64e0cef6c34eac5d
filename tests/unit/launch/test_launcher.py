"""What ``accel-scaler launch`` hands over, with no process started: settings, file, environment."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from places import ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accel_scaler import AccelScalerError, ConfigError, ScalerConfig, UnsupportedError, cli
from accel_scaler.config import ENV_PREFIX, FIELDS, GROUPS
from accel_scaler.console import written
from accel_scaler.launch import launcher as launcher_module
from accel_scaler.launch.launcher import STARTUP, main
from accel_scaler.launch.totals import VARIABLE

ACCELERATE = "distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16\n"
LINES_BEFORE = ACCELERATE.count("\n") + 1


class Started:
    """Stands for Accelerate's ``launch_command``: what it was given, and how the job ended."""

    def __init__(self) -> None:
        self.end: BaseException | None = None
        self.meanwhile: Callable[[], object] = bool
        self.args: Any = None
        self.environment: dict[str, str] = {}
        self.config: Any = None
        self.config_file: Path | None = None

    def __call__(self, args: argparse.Namespace) -> None:
        self.args, self.environment = args, dict(os.environ)
        if args.config_file is not None:
            self.config_file = Path(args.config_file)
            self.config = yaml.safe_load(self.config_file.read_text())
        self.meanwhile()
        if self.end is not None:
            raise self.end

    @property
    def settings(self) -> dict[str, str]:
        return {k: v for k, v in self.environment.items() if k.startswith(ENV_PREFIX)}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """A folder with a script, no default config file, and nothing that starts."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher_module, "default_config_file", str(tmp_path / "default.yaml"))
    for key in os.environ:
        if key.startswith(ENV_PREFIX):
            monkeypatch.delenv(key)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fake = Started()
    monkeypatch.setattr(launcher_module, "launch_command", fake)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    yield fake
    signal.signal(signal.SIGINT, before)


def with_section(text: str, name: str = "config.yaml") -> str:
    """Write a config file whose section has these lines; returns its name."""
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    Path(name).write_text(f"{ACCELERATE}accel_scaler:\n{indented}")
    return name


EVERY = ScalerConfig(
    init_scale=512.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=9, enabled=False,
    min_scale=2.0, max_scale=2.0**17, hysteresis=4, max_consecutive_skips=6, step_mode="delayed",
    delay_warmup_steps=8, delay_compensation="preview", offload="cpu", optimizer_threads=3,
    master_weights="fp32",
    fold_unscale=True, telemetry="a b.jsonl", underflow_interval=7, find_overflow="replay",
    sharded=True, heal=True, fp32_modules=("*.wo", "h.[01].mlp"),
)  # fmt: skip


@pytest.mark.parametrize("source", ["flags", "file", "environment"])
def test_every_field_travels_from_each_source_to_the_ranks(
    started: Started, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    values = EVERY.changed()
    assert {"attach", *values} == set(FIELDS), "each one is changed"
    argv = ["--cpu"]
    if source == "file":
        argv = ["--config_file", with_section(yaml.safe_dump(values))]
    for name, value in values.items():
        if source == "environment":
            monkeypatch.setenv(ENV_PREFIX + name.upper(), EVERY.to_env()[ENV_PREFIX + name.upper()])
        elif source == "flags" and isinstance(value, bool):
            argv += [f"--{name}" if value else f"--no_{name}"]
        elif source == "flags":
            argv += [f"--{name}", EVERY.to_env()[ENV_PREFIX + name.upper()]]
    assert main([*argv, "train.py"]) == 0
    assert ScalerConfig.from_env(started.environment) == EVERY
    assert started.settings == EVERY.to_env()


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code in (0, None)
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_help_shows_our_flags_with_their_texts_and_says_whose_the_others_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = helped(capsys, "--multi_gpu", "--help", "train.py")
    assert out == helped(capsys, "-h")
    lines = out.splitlines()
    assert lines[0].startswith("usage: accel-scaler launch [flags] script.py")
    assert max(map(len, lines)) < 80
    said = " ".join(out.split()).replace("- ", "-")
    for name, spec in FIELDS.items():
        # Of a switch the one that does something.
        flag = f"--no_{name}" if spec.default is True else f"--{name}"
        assert sum(line.split()[:1] == [flag] for line in lines) == 1
        assert " ".join(spec.metadata["about"].split()).replace("- ", "-") in said
    assert [line[:-1] for line in lines if line[:-1] in GROUPS] == list(GROUPS)
    assert "--step_mode sync|overlap|delayed" in out
    assert "All other flags are those of `accelerate launch`" in out
    assert "--fsdp_version" not in out


@pytest.mark.process
def test_help_comes_without_torch() -> None:
    code = (
        "import sys; from accel_scaler import cli; cli.main(['launch', '--help'])\n"
        "print([m for m in ('torch', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.startswith("usage: accel-scaler launch")
    assert done.stdout.endswith("\n[]\n")


def test_help_all_shows_accelerates_groups_too(capsys: pytest.CaptureFixture[str]) -> None:
    out = helped(capsys, "--help-all")
    assert out.startswith("usage: accel-scaler launch ")
    assert "\nFSDP Arguments:\n" in out
    # With more arguments Accelerate leaves out the groups that they do not use.
    few = helped(capsys, "--multi_gpu", "--help-all")
    assert "\nFSDP Arguments:\n" not in few
    for title in GROUPS:
        assert f"\n{title}:\n" in out
        assert f"\n{title}:\n" in few
    for name in FIELDS:
        assert f"--{name}" in few or f"--no_{name}" in few
    assert helped(capsys, "--help_all") == out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--step_mod", "overlap", "train.py"],
         "unknown flag --step_mod. Did you mean --step_mode?"),
        (["--step-mod=overlap", "train.py"], "unknown flag --step-mod. Did you mean --step_mode?"),
        (["--step_mod=overlap"], "unknown flag --step_mod. Did you mean --step_mode?"),
        (["--no-atach", "train.py"], "unknown flag --no-atach. Did you mean --no_attach?"),
        (["--cpu", "--mixed_precison", "fp16", "train.py"],
         "unknown flag --mixed_precison. Did you mean --mixed_precision?"),
        (["--qqq", "train.py"], "unknown flag --qqq. --help-all shows all flags. The script's own"),
        (["-x", "train.py"], "unknown flag -x. --help-all shows"),
        (["--step_mode", "overlapp", "train.py"],
         "--step_mode: got 'overlapp', expected 'sync', 'overlap' or 'delayed'. Did you mean 'ov"),
        (["--step_mode"], "argument --step_mode/--step-mode: expected one argument"),
        (["--num_processes", "two", "train.py"], "--num_processes/--num-processes: invalid int"),
        (["--mixed_precision", "fp61", "train.py"], "argument --mixed_precision/--mixed-precision"),
        (["--cpu"], "no script was given; usage: accel-scaler launch [flags] script.py"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line_with_the_right_one(
    started: Started, argv: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        main(argv)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert started.args is None


@pytest.mark.parametrize(
    "script",
    [
        ["train.py", "--step_mod", "overlap", "--help"],
        ["train.py", "--help-all", "--version"],
        ["-m", "train", "--step_mod=overlap", "-h"],
    ],
)
def test_flags_behind_the_script_are_the_scripts(started: Started, script: list[str]) -> None:
    assert main(["--cpu", "--init-scale", "8", *script]) == 0
    assert started.args.training_script_args == script[1 + (script[0] == "-m") :]
    assert started.settings == {"ACCEL_SCALER_INIT_SCALE": "8.0"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--telemetry", "train.py"], "it exists and is not a telemetry file"),
        (["--telemetry", "."], "'.', which cannot be appended to: it is a folder"),
        (["--telemetry", "new/"], "that is the name of a folder"),
        (["--telemetry", "train.py/x.jsonl"], "train.py is no folder. Choose another path. (--tel"),
        (["--telemetry", "x/" + "n" * 300], "File name too long"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_starts(
    started: Started, flags: list[str], said: str
) -> None:
    Path("train.py").write_text("pass\n")
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as caught:
        main(["--cpu", *flags, "train.py"])
    assert said in str(caught.value)
    assert str(caught.value).endswith(f"({flags[0]})")
    assert started.args is None
    assert sorted(Path().rglob("*")) == before
    # The first host alone writes, or each with {rank}.
    other = ["--multi_gpu", "--num_processes", "2", "--num_machines", "2", "--machine_rank", "1"]
    argv = [*other, *flags, "train.py"]
    assert main(argv) == 0
    argv[-2] = "{rank}/../" + flags[1]
    (Path() / "1").mkdir()
    with pytest.raises(ConfigError):
        main(argv)


def test_what_can_be_written_is_not_made_by_the_launcher(started: Started) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["--cpu", "--telemetry", "new/{rank}.jsonl", "train.py"]) == 0
    assert started.args is not None
    assert sorted(Path().rglob("*")) == before


# --- a dry run -----------------------------------------------------------------------------------


def test_a_dry_run_prints_each_setting_with_its_source_and_starts_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_section("hysteresis: 3\nmin_scale: 2.0\nmax_scale: null\nfind_overflow: off")
    monkeypatch.setenv("ACCEL_SCALER_MIN_SCALE", "4")
    monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", "9")
    flags = ["--growth_interval", "7", "--no_enabled", "--fp32_modules", "*.wo, h.3"]
    before = sorted(Path().rglob("*"))
    environment = dict(os.environ)
    argv = ["--dry_run", "--config_file", "config.yaml", *flags, "train.py", "--lr", "1"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    said = {name: rest for name, *rest in (line.split(maxsplit=1) for line in lines)}
    expected = {
        name: [f"{written(value)} default"]
        for name, value in {"attach": True, **dataclasses.asdict(ScalerConfig())}.items()
    } | {
        "hysteresis": ["3 config.yaml, line 5"],
        "max_scale": ["none config.yaml, line 7"],
        "find_overflow": ["off config.yaml, line 8"],
        "min_scale": ["4 ACCEL_SCALER_MIN_SCALE"],
        "growth_interval": ["7 --growth_interval"],
        "enabled": ["false --no_enabled"],
        "fp32_modules": ["[*.wo, h.3] --fp32_modules"],
    }  # fmt: skip
    assert {name: [" ".join(rest.split())] for name, (rest,) in said.items()} == expected
    assert list(said) == list(FIELDS)
    assert last == "A launch would refuse nothing of this. It was not started: --dry_run."
    assert (err, started.args) == ("", None)
    assert (sorted(Path().rglob("*")), dict(os.environ)) == (before, environment)
    assert main(["--dry-run", *argv[1:]]) == 0


BAD_FILE = f"{ACCELERATE}accel_scaler:\n  step_mode: later\n  find_overflow: true\n"


@pytest.mark.parametrize(
    ("argv", "refused", "shows"),
    [
        (["train.py"], [], True),
        ([], ["no script was given"], True),
        (["--tpu", "no.py"], ["the script 'no.py' does not exist", "an XLA device"], True),
        (["--tpu", "--no_attach", "--telemetry", "train.py", "train.py"],
         ["it exists and is not a telemetry file"], True),
        (["--min_scale", "low", "--config_file", "bad.yaml", "no.py"],
         ["bad.yaml, line 5: step_mode: got 'later'", "line 6: find_overflow: got True",
          "HYSTERESIS: got '0'", "--min_scale: got 'low'", "the script 'no.py'"], False),
        (["--min_scale", "9", "--init_scale", "4", "train.py"],
         ["(init_scale: --init_scale"], False),
        (["--config_file", "no.yaml", "no.py"],
         ["'no.yaml' does not", "the script 'no.py'"], False),
        (["--multi_gpu", "--use_fsdp", "train.py"], ["Accelerate refuses these arguments"], True),
    ],
)  # fmt: skip
def test_a_dry_run_says_every_refusal(
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    refused: list[str],
    shows: bool,
) -> None:
    Path("bad.yaml").write_text(BAD_FILE)
    Path("train.py").write_text("raise SystemExit('started')\n")
    if len(refused) > 3:
        monkeypatch.setenv("ACCEL_SCALER_HYSTERESIS", "0")
    assert cli.main(["launch", "--dry_run", *argv]) == (2 if refused else 0)
    out, err = capsys.readouterr()
    told = err.splitlines()
    assert len(told) == len(refused), err
    for line, text in zip(told, refused, strict=True):
        assert line.startswith("accel-scaler: error: ")
        assert text in line
    assert (out.startswith("attach ")) == shows
    assert started.args is None
    if refused and "Accelerate" not in refused[0]:  # the first is what a launch raises
        with pytest.raises(AccelScalerError) as caught:
            main(argv)
        assert " ".join(str(caught.value).split()) in told[0]


# --- the last line -------------------------------------------------------------------------------


def told(windows: int, skips: int, path: str | None = None) -> None:
    """What a rank does as it ends."""
    row = {"windows": windows, "skips": skips, "path": path and os.path.abspath(path)}
    Path(os.environ[VARIABLE], "1.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("status", [0, 3])
def test_the_last_line_says_what_was_done_and_where_to_see_it(
    started: Started, capsys: pytest.CaptureFixture[str], quiet: bool, status: int
) -> None:
    folders = []

    def meanwhile() -> None:
        folders.append(Path(os.environ[VARIABLE]))
        told(12, 2, "run.jsonl")
        Path("run.jsonl").write_text('{"kind": "start"')

    started.meanwhile = meanwhile
    started.end = killed(status) if status else None
    argv = [*(["-q"] if quiet else []), "--cpu", "--telemetry", "run.jsonl", "train.py"]
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert out == ""
    line = "accel-scaler: 12 windows, 2 skipped; to see them: accel-scaler report run.jsonl"
    assert (err.splitlines()[-1:] == [line]) is not quiet
    assert not (quiet and err)
    assert not folders[0].exists()
    assert VARIABLE not in os.environ


def test_of_a_job_that_was_killed_the_telemetry_is_known(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.jsonl").write_text("")
    line = "accel-scaler: to see them: accel-scaler report old.jsonl\n"
    for text, shown in (("", False), ('{"kind": "start"}\n', True)):
        started.meanwhile = lambda text=text: Path("old.jsonl").write_text(text)  # type: ignore[misc]
        started.end = killed(-9)
        assert main(["--cpu", "--telemetry", "old.jsonl", "train.py"]) == 137
        assert capsys.readouterr().err.endswith(line) is shown


def test_where_no_folder_can_be_made_the_line_is_missing_and_the_job_is_not(
    started: Started, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**kwargs: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher_module.tempfile, "mkdtemp", refused)
    assert main(["--cpu", "train.py"]) == 0
    assert VARIABLE not in started.environment
    assert capsys.readouterr().err == "accel-scaler: attaching with the defaults.\n"


# --- what Accelerate is given -------------------------------------------------------------------


def test_accelerate_gets_its_own_arguments_and_no_other(started: Started) -> None:
    argv = ["--multi_gpu", "--num-processes", "3", "--mixed_precision", "fp16"]
    script = ["train.py", "--min_scale", "7", "--config_file", "x", "-h"]
    assert main([*argv, "--min-scale", "2", "--fold_unscale", *script]) == 0
    expected = launch_command_parser().parse_args([*argv, *script])
    started.args.nondefault -= {name for name in started.args.nondefault if "scaler" in name}
    assert vars(started.args) == vars(expected)
    assert ScalerConfig.from_env(started.environment).min_scale == 2.0


@pytest.mark.parametrize("quiet", [True, False])
def test_the_section_is_taken_out_and_the_rest_unchanged(
    started: Started, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    name = with_section("min_scale: 2\nstep_mode: overlap")
    assert main([*(["-q"] if quiet else []), "--config_file", name, "train.py"]) == 0
    assert started.config == yaml.safe_load(ACCELERATE)
    assert started.config_file is not None
    assert not started.config_file.exists()
    assert not started.config_file.parent.exists()
    out, err = capsys.readouterr()
    assert out == ""
    line = f"step_mode='overlap' ({name}, line {LINES_BEFORE + 2})"
    assert (line in err) is not quiet


def test_json_stays_json(started: Started) -> None:
    rest = {"distributed_type": "NO", "mixed_precision": "fp16"}
    Path("c.json").write_text(json.dumps({**rest, "accel_scaler": {"min_scale": 2}}))
    assert main(["--config_file", "c.json", "train.py"]) == 0
    assert started.config == rest
    assert started.config_file is not None
    assert started.config_file.name == "c.json"
    assert started.settings == {"ACCEL_SCALER_MIN_SCALE": "2"}


def test_a_file_without_a_section_is_handed_over_itself(started: Started) -> None:
    Path("plain.yaml").write_text(ACCELERATE)
    assert main(["--config_file", "plain.yaml", "train.py"]) == 0
    assert started.config_file == Path("plain.yaml")
    assert main(["--config_file", "cpu_fp16", "train.py"]) == 0
    assert started.config["mixed_precision"] == "fp16"


def test_accelerates_default_file_may_have_a_section(started: Started) -> None:
    with_section("min_scale: 2", "default.yaml")
    assert main(["train.py"]) == 0
    assert started.config == yaml.safe_load(ACCELERATE)
    assert started.settings == {"ACCEL_SCALER_MIN_SCALE": "2"}
    assert main(["--cpu", "train.py"]) == 0  # with --cpu Accelerate does not read it
    assert started.args.config_file is None
    assert started.settings == {}


def test_the_hook_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(STARTUP, "sitecustomize.py").read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            names = [node.module or ""]
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)


OTHER_HOOK = """
import sys

class Other:
    'Does what ours does: asks everybody for the spec, and follows the loader.'
    changed = []

    def find_spec(self, name, path=None, target=None):
        if name not in NAMES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                execute = spec.loader.exec_module
                def exec_module(module):
                    RESTORE
                    execute(module)
                    self.changed.append(name)
                spec.loader.exec_module = exec_module
                return spec

class Guarded(Other):
    'As importlib.util.find_spec is used by some: it takes itself out meanwhile.'
    def find_spec(self, name, path=None, target=None):
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            return super().find_spec(name, path, target)
        finally:
            sys.meta_path.insert(place, self)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "kind", "restore"),
    [
        ("in front", "Guarded", "del spec.loader.exec_module"),
        ("behind", "Other", "pass"),
    ],
)
def test_a_hook_beside_that_asks_everybody_too(
    place: str, kind: str, restore: str, tmp_path: Path
) -> None:
    """Each changes the class, once, whoever is asked first."""
    for name in ("accelerate", "transformers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "accelerate" / "accelerator.py").write_text("class Accelerator: pass")
    (tmp_path / "transformers" / "trainer.py").write_text("class Trainer: pass")
    names = ("accelerate.accelerator", "transformers.trainer")
    code = (
        OTHER_HOOK.replace("NAMES", repr(names)).replace("RESTORE", restore)
        + f"""
import sitecustomize
assert {STARTUP!r} == sitecustomize.HERE
own = sys.meta_path.index(next(f for f in sys.meta_path if type(f) is sitecustomize.Finder))
sys.meta_path.insert(own + {place == "behind"}, {kind}())
import importlib.util
seen = []
change = sitecustomize.change
def counted(module, name):
    seen.append(name)
    change(module, name)
sitecustomize.change = counted
assert importlib.util.find_spec(NAMES[0]).origin.startswith({str(tmp_path)!r})
import accelerate.accelerator, transformers.trainer
print(seen, Other.changed)
""".replace("NAMES", repr(names))
    )
    path = os.pathsep.join([STARTUP, str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{list(names)} {list(names)}"


# --- the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "", "a:", f"{STARTUP}:b"])
def test_ranks_find_the_hook_first_and_the_rest_of_their_path(
    started: Started, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    environment = dict(os.environ)
    assert main(["--cpu", "train.py"]) == 0
    rest = [entry for entry in (before or "").split(":") if entry != STARTUP]
    found = started.environment["PYTHONPATH"].split(":")
    assert found == [STARTUP, *(rest if before else [])]
    assert dict(os.environ) == environment


@pytest.mark.parametrize("how", ["flag", "variable", "section"])
def test_off_by_one_setting(started: Started, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{STARTUP}:b")
    argv = ["--cpu", "--min_scale", "2", "train.py"]
    if how == "flag":
        argv = ["--no_attach", *argv]
    elif how == "variable":
        monkeypatch.setenv("ACCEL_SCALER_ATTACH", "0")
    else:
        argv = ["--config_file", with_section("attach: false"), *argv[1:]]
    assert main(argv) == 0
    assert started.environment["PYTHONPATH"] == "b"
    # A script that calls attach() itself still has its settings, and no variable it would refuse.
    assert started.settings == {"ACCEL_SCALER_MIN_SCALE": "2.0"}
    assert main(["--attach", *argv[how == "flag" :]]) == 0
    assert started.environment["PYTHONPATH"] == f"{STARTUP}:b"


def test_a_section_that_switches_off_lets_other_scalers_run(started: Started) -> None:
    Path("c.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {}\n")
    with pytest.raises(UnsupportedError, match="DeepSpeed"):
        main(["--config_file", "c.yaml", "train.py"])
    for other in ("--no_attach", "--multi_gpu", "--cpu"):
        assert main(["--config_file", "c.yaml", other, "train.py"]) == 0
    Path("c.yaml").write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
        "mixed_precision: fp16\nec2_instance_type: x\niam_role_name: y\nuse_cpu: false\n"
        "debug: false\n"
    )
    with pytest.raises(UnsupportedError, match="SageMaker runs the script where"):
        main(["--config_file", "c.yaml", "train.py"])


# --- how it ends --------------------------------------------------------------------------------


def killed(status: int) -> BaseException:
    return subprocess.CalledProcessError(status, ["python", "train.py"])


@pytest.mark.parametrize(("code", "status", "quiet"), [(3, 3, True), (-9, 137, False)])
def test_the_exit_status_is_the_scripts(
    started: Started, capsys: pytest.CaptureFixture[str], code: int, status: int, quiet: bool
) -> None:
    started.end = killed(code)
    assert main([*(["--quiet"] if quiet else []), "--cpu", "train.py"]) == status
    assert ("train.py" in capsys.readouterr().err) is not quiet
    assert not started.args.quiet, "quiet, Accelerate itself ends with 1"


def test_the_exit_status_is_that_of_the_rank_that_failed_first(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {
        rank: ProcessFailure(rank, 100 + rank, code, "<N/A>")
        for rank, code in ((0, -signal.SIGTERM), (1, 7))
    }
    failures[0].timestamp, failures[1].timestamp = 20, 10
    started.end = ChildFailedError("train.py", failures)
    assert main(["--multi_gpu", "--num_processes", "2", "train.py"]) == 7
    assert "Root Cause" in capsys.readouterr().err


@pytest.mark.parametrize("end", [RuntimeError("of Accelerate"), SystemExit(5)])
def test_other_ends_pass_and_leave_nothing_behind(started: Started, end: BaseException) -> None:
    started.end = end
    environment = dict(os.environ)
    with pytest.raises(type(end)):
        main(["--config_file", with_section("min_scale: 2"), "train.py"])
    assert started.config_file is not None
    assert not started.config_file.parent.exists()
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_reach_the_script_whose_end_is_the_launchers(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    children = [SimpleNamespace(send_signal=sent.append)]
    monkeypatch.setattr(
        launcher_module.psutil, "Process", lambda: SimpleNamespace(children=lambda: children)
    )

    def told() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)

    started.meanwhile = told
    started.end = killed(-15)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        assert main(["--cpu", "train.py"]) == 143
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    # Ctrl-C has reached it through the terminal.
    assert sent == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_before_anything_is_started_ends_the_launcher(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module.psutil, "Process", lambda: SimpleNamespace(children=list))
    started.meanwhile = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        main(["--config_file", with_section("min_scale: 2"), "train.py"])
    assert caught.value.code == 130
    assert started.config_file is not None
    assert not started.config_file.parent.exists()


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("argv", [["-"], ["-m", "no_such_module"], ["--no_python", "true"]])
def test_a_script_that_is_no_file_is_for_python_to_find(argv: list[str]) -> None:
    assert main(["--cpu", *argv]) == 0
