"""Each shipped config file launches a few steps on the CPU, and does what ``doctor`` said.

fsdp2_fp16 is not here: on a CPU Accelerate leaves FSDP out without a word, so a launch would show
nothing of the file; ``test_configs.py`` takes it through Accelerate's parsers. Takes about 40 s on
two quiet cores.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import config_script
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from launching import free_port
from places import HELPERS, ROOT
from versions import before_torch

from accel_scaler import cli
from accel_scaler.config_file import read_config, shipped_configs

SCRIPT = str(HELPERS / "config_script.py")
LIMIT = 150
OURS = [sys.executable, "-m", "accel_scaler", "launch"]
STOCK = [sys.executable, "-m", "accelerate.commands.launch"]
GLOO = {"ACCELERATE_USE_CPU": "true"}
NO_FILE = ["fsdp2_fp16"]


def environment(folder: Path, extra: dict[str, str]) -> dict[str, str]:
    """This process's, without what other tests or a user have set."""
    ours = ("ACCELERATE_", "ACCEL_SCALER_", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    kept["PYTHONPATH"] = str(ROOT)
    return kept | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")} | extra


def start(command: list[str], folder: Path, extra: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=environment(folder, extra), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The facts of every rank, by rank, once all have ended well; nothing is left running."""
    facts = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, err
            # Two ranks may write into one line.
            facts += [text for text in out.split("FACTS ") if text.strip()]
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=30)
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(text)[0] for text in facts]
    return sorted(found, key=lambda fact: int(fact["rank"]))


def launch(arguments: list[str], folder: Path, extra: dict[str, str]) -> subprocess.Popen[str]:
    return start([*OURS, *arguments, SCRIPT], folder, extra)


def doctor(arguments: list[str], folder: Path, extra: dict[str, str]) -> dict[str, Any]:
    """What ``accel-scaler doctor --json`` says of the same command in the same environment."""
    with pytest.MonkeyPatch.context() as patch:
        wanted = environment(folder, extra)
        for key in set(os.environ) - set(wanted):
            patch.delenv(key)
        for key, value in wanted.items():
            patch.setenv(key, value)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(["doctor", "--json", *arguments, SCRIPT]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def agree(said: dict[str, Any], facts: list[dict[str, Any]]) -> None:
    """What ``doctor`` said of a launch, beside what its ranks found."""
    job, threads = said["job"], said["threads"]
    assert said["scaling"]["scaler"] == "accel_scaler"
    for fact in facts:
        assert (job["precision"], job["device"]) == (fact["precision"], fact["device"])
        assert fact["ranks"] == job["processes"]
        assert fact["computed_in"] == [f"torch.{said['scaling']['autocast']}"]
        assert (fact["omp"], fact["threads"]) == (threads["training"], threads["optimizer"])
    assert len(facts) == job["processes"]


def as_trained(facts: list[dict[str, Any]]) -> None:
    """Each skipped the one step that overflowed on its last rank, and all have one model."""
    for fact in facts:
        assert fact["accelerator"] == "ScaledAccelerator"
        assert fact["skipped"] == [step == config_script.BAD for step in range(config_script.STEPS)]
        assert fact["scale"] == 2.0**15
        assert fact["weights"] == facts[0]["weights"]


@pytest.fixture(scope="module")
def weights() -> list[list[Any]]:
    """What one process trains here, with ``attach`` called."""
    settings = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**settings, "CALL_ATTACH": "1"}.items():
            patch.setenv(key, value)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        facts = config_script.train()
        torch.set_num_threads(threads)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    as_trained([facts])
    found: list[list[Any]] = facts["weights"]
    return found


def close(ours: list[list[Any]], expected: list[list[Any]]) -> None:
    """Two ranks add up their halves of a batch in another order, in fp16."""
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=5e-3, atol=5e-3)


ONE_PROCESS = {"cpu_fp16": [], "gpu_fp16": ["--cpu"], "gpu_fp16_offload": ["--cpu"]}


def test_the_files_for_one_process_train_what_a_script_with_attach_does(
    tmp_path: Path, weights: list[list[Any]]
) -> None:
    commands = {name: ["--config_file", name, *more] for name, more in ONE_PROCESS.items()}
    started = {name: launch(command, tmp_path, {}) for name, command in commands.items()}
    facts = finish(list(started.values()))
    as_trained(facts)
    for name, fact in zip(commands, facts, strict=True):
        assert fact["weights"] == weights
        section = read_config(shipped_configs()[name]).values
        told = {f"ACCEL_SCALER_{key.upper()}": str(value) for key, value in section.items()}
        told.pop("ACCEL_SCALER_OPTIMIZER_THREADS", None)  # the default again
        assert fact["settings"] == told
        agree(doctor(commands[name], tmp_path, {}), [fact])


def test_the_files_for_several_gpus_train_on_two_gloo_ranks(
    tmp_path: Path, weights: list[list[Any]]
) -> None:
    plain = ["--config_file", str(shipped_configs()["multi_gpu_fp16"])]
    overlap = ["--config_file", "multi_gpu_fp16_overlap", "--main_process_port", str(free_port())]
    # Without a section, a script that calls attach() can be launched by Accelerate alone.
    alone = [*STOCK, *plain, "--main_process_port", str(free_port()), SCRIPT]
    processes = [
        start(alone, tmp_path, GLOO | {"CALL_ATTACH": "1"}),
        launch(overlap, tmp_path, GLOO),
    ]
    facts = finish(processes)
    as_trained(facts)  # overlap computes the numbers of sync
    assert [fact["kind"] for fact in facts] == ["MULTI_CPU"] * 4
    close(facts[0]["weights"], weights)
    ours = [fact for fact in facts if fact["settings"]]
    assert [fact["settings"]["ACCEL_SCALER_STEP_MODE"] for fact in ours] == ["overlap"] * 2
    assert [fact["rank"] for fact in ours] == [0, 1]
    agree(doctor(overlap, tmp_path, GLOO), ours)


def test_the_file_for_two_nodes_joins_two_launchers(
    tmp_path: Path, weights: list[list[Any]]
) -> None:
    command = ["--config_file", "two_nodes_fp16", "--main_process_port", str(free_port())]
    nodes = [[*command, "--machine_rank", str(rank)] for rank in range(2)]
    facts = finish([launch(node, tmp_path, GLOO) for node in nodes])
    as_trained(facts)
    assert [fact["rank"] for fact in facts] == [0, 1]
    close(facts[0]["weights"], weights)
    said = doctor(nodes[1], tmp_path, GLOO)
    assert (said["job"]["hosts"], said["job"]["processes_here"]) == (2, 1)
    agree(said, facts)


@before_torch(2, 7, "with torch 2.6 and Accelerate 1.10 these ranks join")
def test_ranks_that_doctor_calls_lone_are_alone(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("ranks join on an accelerator")
    arguments = ["--config_file", "multi_gpu_fp16", "--main_process_port", str(free_port())]
    facts = finish([launch(arguments, tmp_path, {})])
    assert [fact["ranks"] for fact in facts] == [1, 1]
    said = doctor(arguments, tmp_path, {})
    assert not said["job"]["joined"]
    assert "lone-processes" in [hazard["id"] for hazard in said["hazards"]]


def test_every_shipped_file_is_launched_here_or_named_with_its_reason() -> None:
    text = Path(__file__).read_text()
    assert [name for name in shipped_configs() if text.count(f'"{name}"') < 1] == []
    assert all(name in (__doc__ or "") for name in NO_FILE)
