"""Readers of files under random damage: what comes out is a value or the documented error.

Real files with bytes changed, moved, repeated and cut (telemetry: as a crash leaves it), from a
fixed seed. ``test_config_file.py`` fuzzes free text. FUZZ_ROUNDS (default 1) multiplies the number
of tries.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_scaler import (
    ConfigError,
    ScalerConfig,
    UnsupportedError,
    attach,
    detach,
)
from accel_scaler.config import merge
from accel_scaler.config_file import read_config, shipped_configs
from accel_scaler.launch.launcher import parse, prepare
from accel_scaler.report.html import html_page
from accel_scaler.report.reader import read_run
from accel_scaler.report.summary import in_words, key_numbers
from accel_scaler.telemetry.writer import Journal

ROUNDS = max(1, int(os.environ.get("FUZZ_ROUNDS", "1")))
SECTION = b"""accel_scaler: &s
  step_mode: overlap  # why not
  telemetry: "run.jsonl"
  max_consecutive_skips: 16
more: *s
"""
PIECES = [
    *(bytes([byte]) for byte in b"\0\xff\n\r\t #{}[]\"'\\|>%@`~="),
    *b": |- |? |&a |*a|!!|!!int |!!bool |!!timestamp |!!binary |!!omap |!!pairs |!!set ".split(
        b"|"
    ),
    *b'<<: |---\n|...\n|nan|.inf|1e999|null|12:30:45|\\ud800|"\\ud800"|\\u0000'.split(b"|"),
    *(b"0x" + b"f" * 400, b"9" * 400),
    *(b"\xef\xbb\xbf", b"\xe2\x80\xae", b"\xc2\x85"),  # a mark, a turn of direction, a line end
]

pytestmark = pytest.mark.timeout(120)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a byte, a stretch lost, doubled or moved, a piece, nesting, a cut."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 5, 20, 80])
        stretch, after = data[at : at + length], data[at + length :]
        kind = rng.randrange(7)
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + after
        elif kind == 2:
            data = data[:at] + stretch * rng.choice([2, 3, 30]) + after
        elif kind == 3:
            rest = data[:at] + after
            to = rng.randrange(len(rest) + 1)
            data = rest[:to] + stretch + rest[to:]
        elif kind == 4:
            data = data[:at]
        elif kind == 5:
            data = data[:at] + rng.choice([b"[", b"- ", b"{a: ", b'{"a":']) * rng.choice([3, 3000])
            data += rng.choice([stretch, after])
        else:
            data = data[:at] + rng.choice(PIECES) * rng.choice([1, 1, 3]) + data[at:]
    return data


def one_line(error: Exception, names: object = "", longest: int = 4_000) -> str:
    """The message of an error that this package raises on purpose; it names the file."""
    text = str(error)
    assert str(names) in text
    assert type(error).__module__ == "accel_scaler.errors", "the documented errors are there"
    assert text
    assert "\n" not in text
    assert len(text) < longest
    return text


def try_config(path: Path) -> str:
    """Read a config file every way there is; "read", or which readers refused it."""
    refused = []
    try:
        config, _ = merge((str(path), read_config(path)[0]))
        assert ScalerConfig.from_env(config.to_env()) == config, "the ranks get the same settings"
    except ConfigError as error:
        one_line(error, path)
        refused.append("launch")
    args, ours = parse(["--config_file", str(path), __file__])
    try:
        prepare(args, ours, path.parent / "launch")
        assert not refused
    except (ConfigError, UnsupportedError) as error:  # FSDP where there is no GPU
        one_line(error)
        refused.append("accelerate")
    try:
        assert ScalerConfig.from_yaml(path) == config
    except ConfigError as error:
        one_line(error, path)
        assert "launch" in refused
    return " ".join(refused) or "read"


def config_sources() -> Iterator[Any]:
    for name, path in shipped_configs().items():
        yield pytest.param(f"{name}.yaml", path.read_bytes(), id=f"{name}.yaml")
        if b"accel_scaler:" not in path.read_bytes():
            more = f"{name}.more.yaml"
            yield pytest.param(more, path.read_bytes() + SECTION, id=more)
    document = {"distributed_type": "NO", "accel_scaler": {"step_mode": "overlap", "min_scale": 1}}
    data = json.dumps(document, indent=2).encode()
    yield pytest.param("config.json", data, id="config.json")


@pytest.mark.parametrize(("name", "data"), list(config_sources()))
def test_a_damaged_config_file_is_read_or_refused(name: str, data: bytes, tmp_path: Path) -> None:
    rng, path = random.Random(name), tmp_path / f"c{Path(name).suffix}"
    path.write_bytes(data)
    (tmp_path / "launch").mkdir()
    seen = {try_config(path)}
    for _ in range(25 * ROUNDS):
        path.write_bytes(damaged(data, rng))
        seen.add(try_config(path))
    assert len(seen) > 1, "no damage was noticed"


@pytest.fixture(scope="module")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that training has written, with all that one can hold."""
    path = tmp_path_factory.mktemp("telemetry") / "run.jsonl"
    config = ScalerConfig(telemetry=str(path), step_mode="overlap", find_overflow="always")
    accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    for number in range(12):
        x = torch.full((2, 4), float("inf") if number % 4 == 3 else 1.0)
        accelerator.backward(model(x).float().sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    detach(accelerator)
    return path.read_bytes()


def try_telemetry(path: Path) -> int | str:
    """Read and show a file; its windows, or the refusal."""
    try:
        run = read_run(path)
    except ConfigError as error:
        one_line(error, path)
        return str(error)
    text = in_words(run) + html_page(run)
    assert all(each.value and (each.name + each.value).isprintable() for each in key_numbers(run))
    assert all(c.isprintable() or c == "\n" for c in text)
    return run.windows


def torn(data: bytes, rng: random.Random) -> bytes:
    """As a crash leaves a file: cut off, or with zeros where a block was not written any more."""
    at, end = sorted(rng.choices(range(len(data) + 1), k=2))
    return data[:at] + (b"\0" * (end - at) + data[end:]) * rng.randrange(2)


def test_a_damaged_telemetry_file_is_read_shown_or_refused(
    telemetry: bytes, tmp_path: Path
) -> None:
    rng, path = random.Random(1), tmp_path / "run.jsonl"
    path.write_bytes(telemetry)
    assert try_telemetry(path) == 12
    lines = telemetry.splitlines(keepends=True)
    seen = set()
    for number in range(120 * ROUNDS):
        data = torn(telemetry, rng)
        if number % 3 == 0:  # whole lines in another order, some twice, some lost
            data = b"".join(rng.choices(lines, k=rng.randrange(2 * len(lines))))
        path.write_bytes(data)
        seen.add(try_telemetry(path))
    assert len(seen) > 5
    assert any(type(found) is str for found in seen)


def test_a_damaged_file_is_appended_to_or_refused(telemetry: bytes, tmp_path: Path) -> None:
    """Training that goes on in a file writes behind what is there, or says before it starts."""
    rng, path = random.Random(2), tmp_path / "run.jsonl"
    untouched, appended = [], 0
    for _ in range(80 * ROUNDS):
        data = damaged(telemetry[: rng.choice([40, 400, 10**6])], rng)
        path.write_bytes(data)
        try:
            Journal(str(path), {}).close()
        except ConfigError as error:
            one_line(error, path)
            untouched.append(path.read_bytes() == data)
            continue
        appended += 1
        now = path.read_bytes()
        assert now.startswith(data)
        assert [json.loads(line)["kind"] for line in now[len(data) :].split()] == ["start", "end"]
    assert appended
    assert untouched
    assert all(untouched), "a file that was refused was written to"
