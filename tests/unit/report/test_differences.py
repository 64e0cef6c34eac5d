"""Several runs against the first: settings, where losses part, skips, speed; beside slow counts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.report.command import label
from accel_scaler.report.differences import SMOOTH, Difference, differences, in_rows
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.report.samples import MAX_BINS
from accel_scaler.report.text import all_in_words


def made(
    tmp_path: Path,
    name: str,
    losses: Sequence[Any],
    bad: Sequence[int] = (),
    step_s: float = 0.1,
    settings: dict[str, Any] | None = None,
    **facts: Any,
) -> Run:
    lines = t.story(len(losses), lambda s, _: s in bad, with_norms=False)
    lines[0] |= facts
    lines[0]["settings"] |= settings or {}
    windows = [line for line in lines if line["kind"] == "window"]
    for line, loss in zip(windows, losses, strict=True):
        line["time"] = round(step_s * (line["step"] + 1), 6)
        if loss is not None:
            line["loss"] = loss
    run = read_run(t.write(tmp_path / name, lines))
    label([run])
    return run


def curve(count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [3 * math.exp(-step / 300) + 1 + 0.01 * rng.random() for step in range(count)]


def the(found: Sequence[Difference], name: str) -> Difference:
    (one,) = [each for each in found if each.name.startswith(name)]
    return one


def test_learning_rates_that_differ_come_first_of_all(tmp_path: Path) -> None:
    def with_rates(name: str, *rates: list[float | None]) -> Run:
        lines = t.story(len(rates), lambda *_: False, with_norms=False)
        windows = [line for line in lines if line["kind"] == "window"]
        for line, each in zip(windows, rates, strict=True):
            line["lr"] = each
        return read_run(t.write(tmp_path / name, lines))

    constant = with_rates("a", [1e-3, 1e-3], [1e-3, 1e-3])
    cosine = with_rates("b", [0.0, 0.5], [0.01, 0.5], [2e-5, 0.5])
    none = with_rates("c", [], [None], [])
    row = differences([constant, cosine, none])[0]
    assert row.name == "learning rate"
    assert row.values == ("0.001", "0.01 at most, 2e-05 at last; 0.5", "-")
    assert differences([cosine, cosine])[0].name == "windows"


def test_what_a_run_has_not_is_a_dash_and_no_start_no_difference(tmp_path: Path) -> None:
    scaled, plain = made(tmp_path, "a", [1.0] * 3), made(tmp_path, "b", [1.0] * 3, precision="no")
    assert the(differences([scaled, plain]), "scale at last").values == ("65536", "-")
    assert differences([scaled, read_run(t.write(tmp_path / "c", []))]) == []


def test_settings_and_versions_that_differ_come_first_and_alone(tmp_path: Path) -> None:
    a = made(tmp_path, "a", [1.0] * 3, settings={"telemetry": "a"}, torch="2.12")
    b = made(tmp_path, "b", [1.0] * 3, settings={"step_mode": "overlap", "telemetry": "b"})
    found = differences([a, b])
    assert [each.name for each in found[:3]] == ["step_mode", "torch", "windows"]
    assert found[0].values == ("sync", "overlap")
    assert found[1].values == ("2.12", "2.13.0")
    older = made(tmp_path, "c", [1.0] * 3)
    older.sessions[-1].settings.pop("min_scale")
    assert the(differences([a, older]), "min_scale").values == ("none", "-")


@pytest.mark.parametrize("count", [30, 700, MAX_BINS + 1, 5000])
def test_runs_of_equal_numbers_are_equal_whatever_their_number(tmp_path: Path, count: int) -> None:
    losses = curve(count)
    a = made(tmp_path, "a", losses, bad=[5])
    b = made(tmp_path, "b", losses + curve(4000), bad=[5])
    found = differences([a, b])
    loss = the(found, "mean loss, ")
    assert loss.notes == (f"equal in all {common(a, b)} common windows",)
    assert loss.values[0] == loss.values[1]
    assert "in all" in the(found, "skipped").notes[0]
    assert "in all" in the(found, "scale").notes[0]


def common(a: Run, b: Run) -> int:
    width = max(a.bins.width, b.bins.width)
    return min(a.windows, b.windows) // width * width


def test_where_losses_part_is_told_at_the_first_bit_and_at_one_per_cent(tmp_path: Path) -> None:
    first = curve(500)
    other = [*first[:100], *(loss + 1e-7 for loss in first[100:300]), *(2 * x for x in first[300:])]
    a, b = made(tmp_path, "a", first), made(tmp_path, "b", other)
    (note,) = the(differences([a, b]), "mean loss, step 450 to step 499").notes
    assert note.startswith("equal up to step 99; apart by more than 1 % (means of 20 windows) from")
    means = [
        [sum(each[max(0, end - SMOOTH) : end]) / min(end, SMOOTH) for end in range(1, 501)]
        for each in (first, other)
    ]
    apart = [abs(x - y) > 0.01 * max(x, y) for x, y in zip(*means, strict=True)]
    expected = 500 - apart[::-1].index(False)
    assert note.endswith(f"from step {expected} on")
    values = the(differences([a, b]), "mean loss, ").values
    assert [float(value) for value in values] == pytest.approx(
        [sum(first[450:]) / 50, sum(other[450:]) / 50], rel=1e-4
    )


def test_losses_that_come_together_again_are_not_apart(tmp_path: Path) -> None:
    first = curve(500)
    other = [2 * loss if 100 <= step < 200 else loss for step, loss in enumerate(first)]
    runs = [made(tmp_path, "a", first), made(tmp_path, "b", other)]
    (note,) = the(differences(runs), "mean loss, ").notes
    assert note == "equal up to step 99; within 1 % (means of 20 windows) at the end"


def test_nan_at_the_end_is_apart(tmp_path: Path) -> None:
    first = curve(100)
    runs = [made(tmp_path, "a", first), made(tmp_path, "b", [*first[:60], *["nan"] * 40])]
    loss = the(differences(runs), "mean loss, ")
    assert loss.values[1] == "inf or NaN"
    assert "apart by more than 1 %" in loss.notes[0]


def test_skips_scale_and_speed_are_set_side_by_side(tmp_path: Path) -> None:
    a = made(tmp_path, "a", curve(200), bad=[50])
    b = made(tmp_path, "b", curve(200), bad=[50, 120], step_s=0.05)
    c = made(tmp_path, "c", curve(200), bad=[10])
    found = differences([a, b, c])
    skipped = the(found, "skipped")
    assert skipped.values == ("1 (0.5 %)", "2 (1 %)", "1 (0.5 %)")
    assert skipped.notes == tuple(
        f"the same windows were skipped up to step {step}" for step in (119, 9)
    )
    assert the(found, "scale at last").values == ("32768", "16384", "32768")
    assert the(found, "windows a second").values == ("10", "20", "10")
    assert the(found, "windows a second").notes == ("2.00 of the first", "1.00 of the first")


def test_what_a_run_does_not_have_is_left_out(tmp_path: Path) -> None:
    old, new = made(tmp_path, "a", [None] * 9), made(tmp_path, "b", curve(9))
    found = differences([old, new])
    assert not [each for each in found if each.name.startswith(("loss", "hidden"))]
    empty = read_run(t.write(tmp_path / "empty", []))
    assert differences([empty, new]) == differences([empty, empty]) == []
    assert in_rows([empty, empty])


def test_the_words_begin_with_the_differences(tmp_path: Path) -> None:
    runs = [made(tmp_path, name, curve(40)) for name in ("a", "b", "c")]
    text = all_in_words(runs)
    assert text.startswith("a against b, c\n")
    assert text.index("equal in all 40 common windows") < text.index("Trained")
    assert "  b: equal in all 40" in text
    assert " against " not in all_in_words(runs[:1])
