"""The shipped config files: read by Accelerate's own parsers and by ours; no process is started.

``test_config_files.py`` launches them. Takes about 4 s.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import prepare_multi_gpu_env
from places import ROOT

from accel_scaler import ScalerConfig
from accel_scaler.config import merge
from accel_scaler.config_file import find_config, read_config, shipped_configs
from accel_scaler.launch.launcher import make_parser

# Of each file: processes, machines, the launcher Accelerate takes, and the section's settings.
EXPECTED: dict[str, tuple[int, int, str | None, ScalerConfig | None]] = {
    "cpu_fp16": (1, 1, None, None),
    "fsdp2_fp16": (2, 1, "use_fsdp", None),
    "gpu_bf16": (1, 1, None, None),
    "gpu_bf16_guard": (
        1, 1, None, ScalerConfig(skip_norm_above="4x", max_consecutive_skips=50)
    ),
    "gpu_bf16_offload": (1, 1, None, ScalerConfig(offload="cpu", max_consecutive_skips=50)),
    "gpu_fp16": (1, 1, None, None),
    "gpu_fp16_offload": (1, 1, None, ScalerConfig(offload="cpu", max_consecutive_skips=50)),
    "multi_gpu_bf16": (2, 1, "multi_gpu", None),
    "multi_gpu_fp16": (2, 1, "multi_gpu", None),
    "two_nodes_fp16": (2, 2, "multi_gpu", None),
}  # fmt: skip
LAUNCHERS = ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "tpu")
NAMES = sorted(EXPECTED)


def as_accelerate_reads(path: Path, *more: str) -> Any:
    """The arguments as Accelerate's launcher has them, from file and flags."""
    args = launch_command_parser().parse_args(["--config_file", str(path), *more, "x.py"])
    args, _, _ = _validate_launch_command(args)
    return args


def commands_of(path: Path) -> list[list[str]]:
    """The commands in a file's header, lines that end in a backslash joined."""
    header = path.read_text().split("compute_environment")[0]
    text = header.replace("\\\n#", " ")
    lines = [line.lstrip("# ") for line in text.splitlines() if " launch --" in line]
    return [shlex.split(line, comments=True) for line in lines]


def test_these_files_are_shipped() -> None:
    assert list(shipped_configs()) == NAMES
    assert {path.parent for path in shipped_configs().values()} == {ROOT / "accelerate_configs"}


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_every_file_and_our_section_is_what_is_expected(
    name: str, tmp_path: Path
) -> None:
    processes, machines, launcher, config = EXPECTED[name]
    path = find_config(name)
    section, rest = read_config(path)
    assert merge(("file", section))[0] == (config or ScalerConfig())
    if config is None:  # a script that calls attach can be launched by Accelerate alone
        assert rest is None
    else:
        with pytest.raises(ValueError, match=r"unknown keys \(\['accel_scaler'\]\)"):
            load_config_from_file(str(path))
        path = tmp_path / path.name
        path.write_text(rest or "")
    args = as_accelerate_reads(path)
    assert (args.num_processes, args.num_machines) == (processes, machines)
    assert [flag for flag in LAUNCHERS if getattr(args, flag)] == ([launcher] if launcher else [])
    assert args.mixed_precision == ("bf16" if "_bf16" in name else "fp16")
    assert args.use_cpu == name.startswith("cpu_")
    assert args.machine_rank == 0
    # A command line outranks the file, as the headers say.
    more = as_accelerate_reads(path, "--num_processes", "8", "--machine_rank", "1")
    assert (more.num_processes, more.machine_rank) == (8, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_a_header_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = find_config(name)
    commands = commands_of(path)
    assert any("recipes/" in word for command in commands for word in command)
    for program, launch, *arguments in commands:
        assert launch == "launch"
        ours = program == "accel-scaler"
        assert ours or program == "accelerate"
        args = (make_parser() if ours else launch_command_parser()).parse_args(arguments)
        assert find_config(args.config_file).samefile(path)
        # Accelerate alone needs the path, and a script that calls attach, as all recipes do.
        assert ours or (os.path.isfile(args.config_file) and EXPECTED[name][3] is None)
        if args.training_script != "any_script.py":
            assert "attach(" in Path(args.training_script).read_text()


def test_the_fsdp_file_is_fsdp2_to_accelerate() -> None:
    args = as_accelerate_reads(find_config("fsdp2_fp16"), "--main_process_port", "0")
    environ = prepare_multi_gpu_env(args)
    assert environ["ACCELERATE_USE_FSDP"] == "true"
    with patch_environment(**{key: environ[key] for key in environ if key.startswith("FSDP_")}):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert not plugin.activation_checkpointing
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy", "the policy that offloads nothing"
