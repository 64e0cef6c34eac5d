"""A shipped config file of each kind launches a few steps on the CPU.

``test_configs.py`` takes every file through Accelerate's parsers. Accelerate has no FSDP on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from children import free_port
from launched_script import BAD, STEPS, train
from launching import OURS, facts_in, finish, start
from places import HELPERS
from support import reset

from accel_scaler.config_file import read_config, shipped_configs

SCRIPT = str(HELPERS / "launched_script.py")
GLOO = {"ACCELERATE_USE_CPU": "true"}


def facts_of(*commands: list[str], folder: Path, **extra: str) -> list[dict[str, Any]]:
    """The training of every rank, by rank, once all of these commands have ended well."""
    ended = [finish(p) for p in [start(command, folder, **extra) for command in commands]]
    for code, _, err in ended:
        assert code == 0, err
    return [fact["trained"] for fact in facts_in("".join(out for _, out, _ in ended))]


def as_trained(facts: list[dict[str, Any]], precision: str = "fp16") -> None:
    """Each skipped the one step that overflowed on its last rank, and all have one model."""
    for fact in facts:
        assert fact["class"] == "ScaledAccelerator"
        computed_in = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[precision]
        assert (fact["precision"], fact["computed_in"]) == (precision, [computed_in])
        assert fact["skipped"] == [step == BAD for step in range(STEPS)]
        assert fact["scale"] == (2.0**17 if precision == "fp16" else None)
        assert fact["weights"] == facts[0]["weights"]


def trained_here(precision: str) -> list[list[Any]]:
    """The weights that one process trains here, with ``attach`` called."""
    settings = {"ACCELERATE_MIXED_PRECISION": precision, "ACCELERATE_USE_CPU": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**settings, "CALL_ATTACH": "1"}.items():
            patch.setenv(key, value)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        facts = train()
        torch.set_num_threads(threads)
    reset()
    as_trained([facts], precision)
    found: list[list[Any]] = facts["weights"]
    return found


@pytest.fixture(scope="module")
def weights() -> list[list[Any]]:
    return trained_here("fp16")


def close(ours: list[list[Any]], expected: list[list[Any]]) -> None:
    """Two ranks add up their halves of a batch in another order, in fp16."""
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", ["cpu_fp16", "gpu_fp16_offload"])
def test_a_file_for_one_process_trains_what_a_script_with_attach_does(
    name: str, tmp_path: Path, weights: list[list[Any]]
) -> None:
    facts = facts_of([*OURS, "--config_file", name, "--cpu", SCRIPT], folder=tmp_path)
    as_trained(facts)
    assert facts[0]["weights"] == weights
    section = read_config(shipped_configs()[name])[0]
    told = {f"ACCEL_SCALER_{key.upper()}": str(value) for key, value in section.items()}
    assert facts[0]["settings"] == told


def test_the_file_for_one_gpu_in_bf16_trains_what_a_script_with_attach_does(tmp_path: Path) -> None:
    facts = facts_of([*OURS, "--config_file", "gpu_bf16", "--cpu", SCRIPT], folder=tmp_path)
    as_trained(facts, "bf16")
    assert facts[0]["weights"] == trained_here("bf16")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_file_for_several_gpus_trains_on_two_gloo_ranks(precision: str, tmp_path: Path) -> None:
    flags = ["--step_mode", "overlap", "--main_process_port", str(free_port())]
    command = [*OURS, "--config_file", f"multi_gpu_{precision}", *flags, SCRIPT]
    ours = facts_of(command, folder=tmp_path, **GLOO)
    as_trained(ours, precision)
    assert [fact["kind"] for fact in ours] == ["MULTI_CPU"] * 2
    close(ours[0]["weights"], trained_here(precision))
    assert [fact["settings"]["ACCEL_SCALER_STEP_MODE"] for fact in ours] == ["overlap"] * 2


def test_the_file_for_two_nodes_joins_two_launchers(
    tmp_path: Path, weights: list[list[Any]]
) -> None:
    command = ["--config_file", "two_nodes_fp16", "--main_process_port", str(free_port())]
    nodes = [[*command, "--machine_rank", str(rank)] for rank in range(2)]
    facts = facts_of(*([*OURS, *node, SCRIPT] for node in nodes), folder=tmp_path, **GLOO)
    as_trained(facts)
    close(facts[0]["weights"], weights)
