"""A run that overflows at any scale names its cure: default run, its last message, the next run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from children import free_port
from launching import OURS, facts_in
from places import HELPERS
from sick_script import LR, SICK, WINDOWS, batches, make

pytestmark = pytest.mark.slow

CPU = ["--cpu", "--mixed_precision", "fp16"]
CURE = [f"{SICK}.wo", f"{SICK}.act"]


def run(folder: Path, *flags: str, ranks: int = 1) -> tuple[Any, list[str]]:
    """The facts of the first rank, and its lines on standard error."""
    several = ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port())]
    where = CPU if ranks == 1 else [*several, "--mixed_precision", "fp16"]
    script = [str(HELPERS / "sick_script.py")]
    extra = {} if ranks == 1 else {"ACCELERATE_USE_CPU": "true"}
    code, out, err = launching.run([*OURS, *where, *flags, *script], folder, **extra)
    assert code == 0, err
    (facts,) = facts_in(out)
    return facts, [line.removeprefix("accel_scaler: ") for line in err.splitlines()]


def verdicts(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match("Nothing was trained|[0-9]+ steps,", line)]


def by_hand() -> list[float]:
    """The losses with torch's own autocast and scaler, and these two modules in float32."""
    model, losses = make(), []
    for name in CURE:
        module = model.get_submodule(name)

        def forward(x: torch.Tensor, found: Any = module.forward) -> Any:
            with torch.autocast("cpu", enabled=False):
                return found(x.float())

        module.forward = forward
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu")
    for words in batches():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=words, labels=words).loss
        scaler.scale(loss.float()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_last_message_of_a_sick_run_is_the_way_to_its_cure(tmp_path: Path) -> None:
    facts, lines = run(tmp_path)
    assert facts["skips"] == WINDOWS
    assert [line for line in lines if line.startswith("step ")] == [
        line for line in lines if line.startswith(f"step 6 overflowed: forward of {SICK}.wo ")
    ]
    (text,) = verdicts(lines)
    assert text.startswith(f"Nothing was trained: {WINDOWS} steps, {WINDOWS} skipped")
    assert "data" not in text
    assert "shared.weight" not in text, "the embeddings are not the cause"
    command = re.search(r"Next: heal=True \((\S+)\), which", text)
    assert command is not None

    facts, lines = run(tmp_path, *shlex.split(command[1]))
    assert facts["skips"] == 1
    assert sum("micro-batch 0: input in [" in line for line in lines) == 1, "where: said once"
    (text,) = verdicts(lines)
    assert text.startswith(f"{WINDOWS} steps, 1 skipped")
    found = re.search(r"next time, pass .* \((--fp32_modules \S+)\)\.$", text)
    assert found is not None

    flags = shlex.split(found[1])
    assert flags[1].split(",") == CURE
    facts, lines = run(tmp_path, *flags)
    assert (facts["skips"], verdicts(lines)) == (0, [])
    expected = by_hand()
    # Processors round float16 products each in their way; in the last steps that is seen.
    assert facts["losses"][:8] == pytest.approx(expected[:8], rel=1e-3)
    assert facts["losses"] == pytest.approx(expected, rel=1e-2)
    assert expected[-1] < expected[0] / 3


def test_of_two_ranks_the_first_one_says_the_verdict(tmp_path: Path) -> None:
    facts, lines = run(tmp_path, ranks=2)
    assert facts["skips"] == WINDOWS
    (text,) = verdicts(lines)
    assert f"{SICK}.wo" in text
    assert "Next: heal=True (--heal), " in text
    assert sum(line.startswith("step ") for line in lines) == 1, "one rank is enough"
