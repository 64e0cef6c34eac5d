"""How far off it was what ``delayed`` showed of an update: as plain torch has it; no bit moves."""

from __future__ import annotations

import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from references import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    OPTIMIZERS,
    Reference,
    assert_same_run,
    loss_of,
    network,
    recording,
    run_ours,
    run_reference,
)
from telemetry_runs import windows_of

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer import inflight_step, shown_error

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

WINDOWS: Any = {"steps": 20, "overflows": (0, 7, 8, 13)}


def errors_of(path: Path) -> list[float | None]:
    return [line.get("preview_error") for line in windows_of(path)]


def assert_errors(path: Path, expected: list[float | None], tolerance: float = 1e-4) -> None:
    found = errors_of(path)
    assert [e is None for e in found] == [e is None for e in expected]
    assert [e for e in found if e is not None] == pytest.approx(
        [e for e in expected if e is not None], rel=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_that_of_the_reference_and_changes_no_bit(
    kind: str, offload: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    settings: Any = {**WINDOWS, "make": partial(network, dtype), "compensation": "preview"}
    ours = run_ours(kind, offload=offload, clip={"max_norm": 0.5}, telemetry=path, **settings)
    expected = run_reference(kind, 0, max_norm=0.5, **settings)
    assert_same_run(ours, expected)
    assert_same_run(ours, run_ours(kind, offload=offload, clip={"max_norm": 0.5}, **settings))
    # Of a preview without second moments only the rounding is left, which a float32 norm tells
    # differently from a float64 one.
    is_exact = kind == "sgd" and dtype is torch.float32
    assert_errors(path, expected["errors"], 0.05 if is_exact else 1e-4)
    found = [e for e in errors_of(path) if e is not None]
    if is_exact:
        assert max(found) < 1e-4
    elif dtype is torch.float32:
        assert all(1e-3 < e < 1.0 for e in found)
    skips = [line["skipped"] for line in windows_of(path)]
    assert all(error is None for error, skip in zip(errors_of(path), skips, strict=True) if skip)
    kinds = [line.get("delay_compensation") for line in windows_of(path)]
    assert all(k == ["preview"] for k, e in zip(kinds, errors_of(path), strict=True) if e)
    assert kinds[1] is None  # the first update of all is not late: no preview of it is known


def test_warm_up_steps_are_not_late_and_so_not_off(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    settings: Any = {**WINDOWS, "compensation": "preview"}
    run_ours("adamw", delay_warmup_steps=5, telemetry=path, **settings)
    expected = run_reference("adamw", 5, **settings)["errors"]
    assert_errors(path, expected)
    assert expected[:6] == [None] * 6


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_what_auto_takes_is_in_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_ours(kind, compensation="auto", telemetry=path, **WINDOWS)
    taken = [line.get("delay_compensation") for line in windows_of(path)]
    assert taken[-1] == ["preview"]
    assert [t is None for t in taken] == [error is None for error in errors_of(path)]


def test_without_compensation_it_is_said_and_nothing_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_ours("adamw", compensation="none", telemetry=path, **WINDOWS)
    lines = windows_of(path)
    late = [line.get("delay_compensation") for line in lines]
    assert late == [None if line["skipped"] else ["none"] for line in lines]
    assert errors_of(path) == [None] * len(lines)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_other_modes_have_nothing_of_it(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_ours("adamw", mode, telemetry=path)
    assert not any(
        {"preview_error", "delay_compensation"} & line.keys() for line in windows_of(path)
    )


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_nothing_is_measured_for_nobody(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("nobody listens")

    monkeypatch.setattr(inflight_step, "ShownError", never)
    settings: Any = {**WINDOWS, "compensation": "preview"}
    ours = run_ours("adamw", offload=offload, **settings)
    assert_same_run(ours, run_reference("adamw", 0, **settings))


def test_two_optimizers_are_one_number(tmp_path: Path) -> None:
    path, kinds = tmp_path / "run.jsonl", ["adamw", "sgd"]
    models, plain = [network(), network(torch.float16)], [network(), network(torch.float16)]
    references = [
        Reference(m.parameters(), OPTIMIZERS[kind], 0, "preview")
        for m, kind in zip(plain, kinds, strict=True)
    ]
    expected: list[float | None] = []
    scaler = GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    with recording(scaler, path):
        ours = [
            AsyncOptimizer(
                OPTIMIZERS[kind](m.parameters()),
                m,
                scaler=scaler,
                mode="delayed",
                delay_compensation="preview",
            )
            for m, kind in zip(models, kinds, strict=True)
        ]
        for step in range(8):
            for model, reference in zip(plain, references, strict=True):
                (loss_of(model, step) * reference.scale).backward()
                reference.boundary()
            found = [r.error for r in references if r.error is not None]
            off, moved = (math.hypot(*norms) for norms in zip((0.0, 0.0), *found, strict=True))
            expected.append(off / moved if moved else None)
            scaler.scale(sum(loss_of(model, step) for model in models)).backward()
            for optimizer in ours:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in ours:
            optimizer.close()
    assert_errors(path, expected)
    lines = windows_of(path)
    assert "delay_compensation" not in lines[0]
    assert lines[-1]["delay_compensation"] == ["preview", "preview"]


def test_of_large_tensors_a_sample_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "all.jsonl", tmp_path / "sample.jsonl"]
    settings: Any = {**WINDOWS, "compensation": "preview"}
    runs = []
    for path, most in zip(paths, (1 << 16, 16), strict=True):
        monkeypatch.setattr(shown_error, "SAMPLE", most)
        runs.append(run_ours("adamw", telemetry=path, **settings))
        assert len(shown_error._sample(torch.empty(64, 8))) <= most or most > 512
    assert_same_run(runs[0], runs[1])
    of_all, of_some = ([e for e in errors_of(path) if e is not None] for path in paths)
    assert of_all != of_some
    assert statistics.mean(of_some) == pytest.approx(statistics.mean(of_all), rel=0.2)
