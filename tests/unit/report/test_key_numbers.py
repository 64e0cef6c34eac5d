"""The key numbers are those of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import telemetry_files as t

from accel_scaler.report.reader import read_run
from accel_scaler.report.summary import NONE, TILES, key_numbers


def tiles(tmp_path: Path, lines: list[Any]) -> dict[str, tuple[str, str]]:
    run = read_run(t.write(tmp_path / "run.jsonl", lines))
    return {tile.name: (tile.value, tile.more) for tile in key_numbers(run)[:TILES]}


def test_each_has_its_number(tmp_path: Path) -> None:
    lines = t.story(1200, lambda s, scale: scale > 32768, growth_interval=500, with_times=True)
    for line in lines:
        if line["kind"] == "window":
            line["loss"] = 5.0 - line["step"] / 1000
    assert tiles(tmp_path, lines) == {
        "steps": ("1,200", ""),
        "skipped": ("3", "0.25 % of all: 1 searching, 2 after growth"),
        "last loss": ("3.801", "5 at first, lowest 3.801"),
        "scale": ("32768", "65536 at first, lowest 32768 (step 0)"),
        "steps a second": ("10", "after the first step; 2 min in all"),
        "optimizer hidden": ("93.3 %", "of 30 ms an update"),
    }


def test_what_a_run_lacks_is_a_dash_and_says_why(tmp_path: Path) -> None:
    bare = tiles(tmp_path, [t.start(precision="bf16"), t.window(0, 1.0)])
    assert bare["last loss"] == (NONE, "not recorded")
    assert "scale" not in bare  # nothing is scaled in bf16
    assert bare["largest finite norm"] == ("1.25", "step 0")
    assert bare["steps a second"] == (NONE, "")
    assert bare["optimizer hidden"] == (NONE, "no times in the file")
    empty = tiles(tmp_path, [t.start()])
    assert set(empty) - set(bare) == {"scale"}
    assert empty["steps"] == ("0", "")
    assert empty["skipped"] == ("0", "0 % of all")


def test_sessions_are_added_up_and_a_loss_that_is_no_number_is_shown(tmp_path: Path) -> None:
    lines = [*t.story(30, lambda *_: False), *t.story(20, lambda *_: False)]
    lines[-2]["loss"] = "nan"
    found = tiles(tmp_path, lines)
    assert found["steps"] == ("50", "in 2 sessions")
    assert found["last loss"] == ("nan", "")
    assert found["steps a second"] == ("10", "after the first step; 5 s in all")


def test_an_update_that_is_awaited_is_a_time_and_not_a_share(tmp_path: Path) -> None:
    times = {"optimizer_us": 30_000, "waited_us": 30_000}
    found = tiles(tmp_path, [t.start(), *(t.window(s, **times) for s in range(3))])
    assert found["optimizer's update"] == ("30 ms", "on average")
    assert "optimizer hidden" not in found


def test_what_belongs_to_no_window_stands_below_the_tiles(tmp_path: Path) -> None:
    lines = [
        *(
            t.start(),
            t.noted(0, parameters=124439808, parameters_trained=294912, parameter_bytes=497759232),
        ),
        *(t.window(0), t.noted(0, eval_loss=2.5), t.window(1), t.noted(1, eval_loss=2.25)),
        *(
            t.noted(1, eval_loss="nan"),
            t.noted(1, eval_f1="nan"),
            t.noted(1, test_f1=0.5),
            t.noted(1, host_peak_bytes=2**31),
        ),
        t.noted(1, host_peak_bytes=2**30, parameters=124439808),  # of another session
    ]
    run = read_run(t.write(tmp_path / "run.jsonl", [*lines, t.end(2)]))
    assert (run.windows, run.broken) == (2, 0)
    found = {each.name: f"{each.value} {each.more}".strip() for each in key_numbers(run)}
    assert (
        found.items()
        >= {
            "parameters": "124,439,808",
            "parameters trained": "294,912",
            "memory of the parameters": "497.8 MB",
            "eval_loss": "nan lowest 2.25, highest 2.5",
            "eval_f1": "nan",
            "test_f1": "0.5",
            "peak memory, host": "1,073.7 MB lowest 1,073.7 MB, highest 2,147.5 MB",
        }.items()
    )
