"""What ``accel-scaler launch`` hands over, without starting a process."""

from __future__ import annotations

import argparse
import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch as commands
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accel_scaler import AccelScalerError, ConfigError, ScalerConfig, cli
from accel_scaler.config import ABOUT, ENV_PREFIX, FIELDS
from accel_scaler.console import written
from accel_scaler.launch import launcher as launcher_module
from accel_scaler.launch.launcher import STARTUP, main

ACCELERATE = "distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16\n"


class Started:
    """Stands for Accelerate's ``launch_command``: what it was given, and how the job ends."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.args: Any = None
        self.environment: dict[str, str] = {}
        self.config: Any = None
        self.config_file: Path | None = None

    def __call__(self, args: argparse.Namespace) -> None:
        self.args, self.environment = args, dict(os.environ)
        if args.config_file is not None:
            self.config_file = Path(args.config_file)
            self.config = yaml.safe_load(self.config_file.read_text())
        if self.error is not None:
            raise self.error

    @property
    def settings(self) -> dict[str, str]:
        return {k: v for k, v in self.environment.items() if k.startswith(ENV_PREFIX)}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """A folder with a script, no default config file, and a launch that starts nothing."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher_module, "default_config_file", str(tmp_path / "default.yaml"))
    for key in os.environ:
        if key.startswith(ENV_PREFIX):
            monkeypatch.delenv(key)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fake = Started()
    monkeypatch.setattr(launcher_module, "launch_command", fake)
    return fake


def with_section(text: str, name: str = "config.yaml") -> str:
    """Write a config file whose section has these lines; returns its name."""
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    Path(name).write_text(f"{ACCELERATE}accel_scaler:\n{indented}")
    return name


EVERY = ScalerConfig(
    init_scale=512.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=9, enabled=False,
    min_scale=2.0, max_scale=2.0**17, hysteresis=4, max_consecutive_skips=6, step_mode="overlap",
    skip_nonfinite=False, skip_norm_above="4.5x",
    offload="cpu", offload_budget="6GiB", master_weights="fp32",
    telemetry="a b.jsonl", log_values=False,
    find_overflow="replay",
    sharded=True, heal=True, on_overflow="retry",
    fp32_modules=("*.wo", "h.[01].mlp"),
)  # fmt: skip


@pytest.mark.parametrize("source", ["flags", "file", "environment"])
def test_every_field_travels_from_each_source_to_the_ranks(
    started: Started, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    values, texts = EVERY.changed(), EVERY.to_env()
    assert set(values) == set(FIELDS), "each one is changed"
    argv = ["--cpu"]
    if source == "file":
        argv = ["--config_file", with_section(yaml.safe_dump(values))]
    for name, value in values.items():
        text = texts[ENV_PREFIX + name.upper()]
        if source == "environment":
            monkeypatch.setenv(ENV_PREFIX + name.upper(), text)
        elif source == "flags" and isinstance(value, bool):
            argv += [f"--{name}" if value else f"--no_{name}"]
        elif source == "flags":
            argv += [f"--{name}", text]
    assert main([*argv, "train.py"]) == 0
    assert ScalerConfig.from_env(started.environment) == EVERY
    assert started.settings == texts


def test_help_shows_our_flags_with_their_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--multi_gpu", "--help", "train.py"])
    out = capsys.readouterr().out
    assert cli.main(["launch", "-h"]) == 0
    assert out == capsys.readouterr().out
    said = " ".join(out.split()).replace("- ", "-")
    for name, spec in FIELDS.items():
        flag = f"--no_{name}" if spec.default is True else f"--{name}"
        assert sum(line.split()[:1] == [flag] for line in out.splitlines()) == 1
        assert ABOUT[name].replace("- ", "-") in said
    assert "--fsdp_version" not in out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--step_mod", "overlap", "train.py"],
         "unknown flag --step_mod. Did you mean --step_mode?"),
        (["--step-mod=overlap", "x"], "unknown flag --step-mod. Did you mean --step_mode?"),
        (["--mixed_precison", "fp16", "train.py"], "Did you mean --mixed_precision?"),
        (["-x", "train.py"], "unknown flag -x. See --help"),
        (["--step_mode", "overlapp", "train.py"], "step_mode: got 'overlapp', expected 'sync'"),
        (["--num_processes", "two", "train.py"], "--num_processes/--num-processes: invalid int"),
        (["--cpu"], "no script is given; usage: accel-scaler launch [flags] script.py"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_line(started: Started, argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(argv)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert started.args is None


# A dry run.


def test_a_dry_run_prints_each_setting_with_its_source_and_starts_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_section("hysteresis: 3\nmin_scale: 2.0\nfind_overflow: off")
    monkeypatch.setenv("ACCEL_SCALER_MIN_SCALE", "4")
    flags = ["--growth_interval", "7", "--no_enabled", "--fp32_modules", "*.wo, h.3"]
    before, environment = sorted(Path().rglob("*")), dict(os.environ)
    argv = ["--dry_run", "--config_file", "config.yaml", *flags, "train.py", "--lr", "1"]
    assert main(argv) == 0
    (table, section), err = (captured := capsys.readouterr()).out.split("\n\n"), captured.err
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines()}
    expected = {name: f"{written(spec.default)} default" for name, spec in FIELDS.items()}
    assert rows == expected | {
        "mixed_precision": "fp16 Accelerate",
        "num_processes": "1 Accelerate",
        "hysteresis": "3 config.yaml",
        "find_overflow": "off config.yaml",
        "min_scale": "4 environment",
        "growth_interval": "7 command line",
        "enabled": "false command line",
        "fp32_modules": "[*.wo, h.3] command line",
    }
    assert (err, started.args) == ("", None)
    assert (sorted(Path().rglob("*")), dict(os.environ)) == (before, environment)
    # To be pasted into a file: there they are the same settings.
    monkeypatch.delenv("ACCEL_SCALER_MIN_SCALE")
    Path("pasted.yaml").write_text(ACCELERATE + section.partition("\n")[2])
    assert main(["--dry_run", "--config_file", "pasted.yaml", "train.py"]) == 0
    again = capsys.readouterr().out.split("\n\n")
    assert again[1] == section.rstrip() + "\n"
    assert [line.split()[:2] for line in again[0].splitlines()] == [
        line.split()[:2] for line in table.splitlines()
    ]


def test_a_dry_run_without_a_scale_leaves_out_its_settings(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dry_run", "--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16"]
    assert main([*argv, "--min_scale", "4", "--no_enabled", "train.py"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in table}
    assert rows["mixed_precision"] == "bf16 Accelerate"
    assert rows["num_processes"] == "2 Accelerate"
    assert rows["min_scale"] == "4 command line; refused without fp16"
    assert rows["enabled"] == "false command line; fp16 only"
    assert {"init_scale", "heal"}.isdisjoint(rows)
    assert {"offload", "skip_nonfinite", "fp32_modules"} <= rows.keys()


MULTI_CPU = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\nnum_processes: 2\n"


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["launch", "dry_run"])
def test_one_process_in_place_of_several_is_said(
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dry: list[str],
) -> None:
    """Accelerate itself takes its launcher of one process there."""
    Path("cpus.yaml").write_text(f"{MULTI_CPU}mixed_precision: bf16\n")
    argv, calls = ["--config_file", "cpus.yaml", "train.py"], []
    monkeypatch.setattr(commands, "simple_launcher", calls.append)
    commands.launch_command(launch_command_parser().parse_args(argv))
    assert len(calls) == 1
    assert main([*dry, "--config_file", "cpus.yaml", "train.py"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("accel-scaler: warning: num_processes is 2, but Accelerate starts one")
    assert "--multi_gpu" in first
    assert "ACCELERATE_USE_CPU=true" in first
    assert main([*dry, "--config_file", "cpus.yaml", "--num_processes", "1", "train.py"]) == 0
    assert main([*dry, "--config_file", "cpus.yaml", "--multi_gpu", "train.py"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        (["train.py"], ""),
        (["--tpu", "no.py"], "the script 'no.py' does not exist"),
        (["--tpu", "train.py"], "an XLA device"),
        (["--use_deepspeed", "train.py"], "DeepSpeed's engine scales the loss"),
        (["--config_file", "deepspeed.yaml", "train.py"], "DeepSpeed's engine scales the loss"),
        (["--tpu", "--no_attach", "train.py"], ""),
        (["--min_scale", "low", "--config_file", "bad.yaml", "no.py"],
         "bad.yaml: step_mode: got 'later'"),
        (["--min_scale", "9", "--init_scale", "4", "train.py"], "(init_scale: command line;"),
        (["--config_file", "no.yaml", "no.py"], "'no.yaml', and there is no"),
        (["--config_file", "empty.yaml", "train.py"], "empty.yaml: the file is empty"),
        (["--multi_gpu", "--use_fsdp", "train.py"], "Accelerate refuses these arguments"),
        (["--config_file", "fsdp.yaml", "train.py"], "got FSDP with num_processes=2 without"),
        (["--config_file", "text.yaml", "train.py"], "got FSDP with num_processes=2 without"),
        (["--config_file", "fsdp.yaml", "--no_attach", "train.py"], ""),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_launch_refuses(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    argv: list[str], refused: str,
) -> None:  # fmt: skip
    with_section("step_mode: later", "bad.yaml")
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n")
    Path("text.yaml").write_text("distributed_type: FSDP\nnum_processes: '2'\n")
    monkeypatch.setattr(launcher_module, "present_type", lambda: "cpu")
    Path("empty.yaml").touch()
    Path("deepspeed.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 1\n")
    assert cli.main(["launch", "--dry_run", *argv]) == (2 if refused else 0)
    lines = capsys.readouterr().err.splitlines()
    assert started.args is None
    if not refused:
        assert lines == []
        assert main(argv) == 0
        return
    (line,) = lines
    assert line.startswith("accel-scaler: error: ")
    assert refused in line
    with pytest.raises(AccelScalerError) as caught:
        main(argv)
    assert " ".join(str(caught.value).split()) in line
    assert started.args is None


@pytest.mark.parametrize(
    ("present", "use_cpu", "flags", "why"),
    [
        ("cuda", None, [], ""),
        ("cuda", "0", [], ""),
        ("cuda", "True", [], "ACCELERATE_USE_CPU"),
        ("cpu", None, [], "this machine has cpu only"),
        ("mps", "", [], "this machine has mps only"),
        ("cpu", None, ["--num_processes", "1"], ""),
        ("cpu", "1", ["--multi_gpu"], ""),
    ],
)
def test_fsdp_that_accelerate_would_leave_out_is_refused(
    started: Started, monkeypatch: pytest.MonkeyPatch,
    present: str, use_cpu: str | None, flags: list[str], why: str,
) -> None:  # fmt: skip
    """Also where neither the file nor a flag says it; ``test_config_files.py`` starts two ranks."""
    monkeypatch.setattr(launcher_module, "present_type", lambda: present)
    if use_cpu is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
    argv = ["--config_file", "fsdp2_fp16", *flags, "train.py"]
    if not why:
        assert main(argv) == 0
        return
    with pytest.raises(AccelScalerError, match=rf"num_processes=2 without GPUs \({why}\): "):
        main(argv)
    assert started.args is None


# What Accelerate is given.


def test_accelerate_gets_its_own_arguments_and_no_other(started: Started) -> None:
    argv = ["--multi_gpu", "--num-processes", "3", "--mixed_precision", "fp16"]
    script = ["train.py", "--min_scale", "7", "--config_file", "x", "-h"]
    assert main([*argv, "--min-scale", "2", "--heal", *script]) == 0
    expected = launch_command_parser().parse_args([*argv, *script])
    started.args.nondefault -= {name for name in started.args.nondefault if "scaler" in name}
    assert vars(started.args) == vars(expected)
    assert ScalerConfig.from_env(started.environment).min_scale == 2.0


@pytest.mark.parametrize("quiet", [True, False])
def test_the_section_is_taken_out_and_the_settings_are_printed(
    started: Started, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    """Also those at their defaults: they outrank GradScalerKwargs in the script."""
    name = with_section("min_scale: 2\nstep_mode: overlap\ngrowth_interval: 2000")
    assert main([*(["-q"] if quiet else []), "--config_file", name, "train.py"]) == 0
    assert started.settings[f"{ENV_PREFIX}GROWTH_INTERVAL"] == "2000"
    assert started.config == yaml.safe_load(ACCELERATE)
    assert started.config_file is not None
    assert not started.config_file.parent.exists()
    (said,) = capsys.readouterr().err.splitlines() or [""]
    settings = "min_scale=2.0, step_mode='overlap', growth_interval=2000"
    for part in (f" {settings} ({name})", "; mixed_precision='fp16'. What "):
        assert (part in said) is not quiet


def test_accelerates_default_file_may_have_a_section(started: Started) -> None:
    with_section("min_scale: 2", "default.yaml")
    assert main(["train.py"]) == 0
    assert started.config == yaml.safe_load(ACCELERATE)
    assert started.settings == {"ACCEL_SCALER_MIN_SCALE": "2.0"}
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


@pytest.mark.parametrize("before", [None, "", "a:", f"{STARTUP}:b"])
@pytest.mark.parametrize("more", [[], ["--no_attach"]], ids=["attach", "no_attach"])
def test_ranks_find_the_hook_first_and_the_rest_of_their_path(
    started: Started, monkeypatch: pytest.MonkeyPatch, before: str | None, more: list[str]
) -> None:
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    environment = dict(os.environ)
    assert main(["--cpu", "--min_scale", "2", *more, "train.py"]) == 0
    rest = [entry for entry in before.split(":") if entry != STARTUP] if before else []
    found = started.environment["PYTHONPATH"]
    assert found == ":".join(rest if more else [STARTUP, *rest])
    assert started.settings == {"ACCEL_SCALER_MIN_SCALE": "2.0"}
    assert dict(os.environ) == environment


# How it ends.


def ended(status: int) -> BaseException:
    return subprocess.CalledProcessError(status, ["python", "train.py"])


@pytest.mark.parametrize(("code", "status", "quiet"), [(3, 3, True), (-9, 137, False)])
def test_the_exit_status_is_the_scripts(
    started: Started, capsys: pytest.CaptureFixture[str], code: int, status: int, quiet: bool
) -> None:
    started.error = ended(code)
    assert main([*(["--quiet"] if quiet else []), "--cpu", "train.py"]) == status
    assert ("train.py" in capsys.readouterr().err) is not quiet
    assert not started.args.quiet, "quiet, Accelerate itself ends with 1"


def test_the_exit_status_is_that_of_the_rank_that_failed_first(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {0: -signal.SIGTERM, 1: 7}
    failures = {rank: ProcessFailure(rank, 100 + rank, codes[rank], "<N/A>") for rank in codes}
    failures[0].timestamp, failures[1].timestamp = 20, 10
    started.error = ChildFailedError("train.py", failures)
    assert main(["--multi_gpu", "--num_processes", "2", "train.py"]) == 7
    assert "Root Cause" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("of Accelerate"), SystemExit(5)])
def test_other_errors_pass_and_leave_nothing_behind(started: Started, error: BaseException) -> None:
    started.error = error
    environment = dict(os.environ)
    with pytest.raises(type(error)):
        main(["--config_file", with_section("min_scale: 2"), "train.py"])
    assert started.config_file is not None
    assert not started.config_file.parent.exists()
    assert dict(os.environ) == environment


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("argv", [["-"], ["-m", "no_such_module"], ["--no_python", "true"]])
def test_a_script_that_is_no_file_is_for_python_to_find(argv: list[str]) -> None:
    assert main(["--cpu", *argv]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fold_unscale"], "fold_unscale is retired: drop it"),
        (["--optimizer_threads", "2"], "optimizer_threads is retired: drop it"),
        (["--delay-warmup-steps=2"], "delay_warmup_steps is retired"),
        (["--step_mode", "delayed"], "step_mode='delayed' is retired: use offload='cpu'"),
    ],
)
def test_a_retired_flag_is_named_and_nothing_is_started(
    started: Started, flags: list[str], said: str
) -> None:
    with pytest.raises(AccelScalerError, match=re.escape(said)):
        main(["--cpu", *flags, "train.py"])
    assert started.args is None
