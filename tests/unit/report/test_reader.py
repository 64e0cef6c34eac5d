"""The reader of telemetry files: bounded, exact, and not to be upset by anything in a file."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.errors import ConfigError
from accel_scaler.report import samples
from accel_scaler.report.reader import LONGEST_LINE, read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.telemetry import Record


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def test_totals_equal_those_of_the_windows(tmp_path: Path) -> None:
    lines = t.story(300, lambda step, scale: step < 3 or step % 90 == 89, with_times=True)
    windows = [line for line in lines if line["kind"] == "window"]
    run = read(tmp_path, lines)
    norms = [w["grad_norm"] for w in windows if w["grad_norm"] != "inf"]
    assert run.windows == len(windows) == 300
    assert run.skips == run.overflows == sum(w["skipped"] for w in windows) == 6
    assert (run.first_scale, run.last_scale) == (65536.0, windows[-1]["next_scale"])
    step = next(w["step"] for w in windows if w["grad_norm"] == max(norms))
    assert run.highest == (max(norms), step)
    assert (run.limited, run.clipped) == (len(norms), sum(norm > 1.0 for norm in norms))
    assert run.stepped_bad == 0
    assert run.timing.updates == 300
    seconds = (run.timing.optimizer, run.timing.waited, run.timing.hidden)
    assert seconds == pytest.approx((9.0, 0.6, 8.4))
    assert run.sessions[0].ended
    assert run.broken == 0


def test_a_file_with_spans_is_read_for_what_is_still_known(tmp_path: Path) -> None:
    """There was a timeline; whatever stands in its key is passed over."""
    times = {"optimizer_us": 30_000, "waited_us": 2_000, "hidden_us": 28_000}
    spans = [["forward", 0, 30], ["wait", 40, 2, "h.0"]]
    run = read(tmp_path, [t.start(), *(t.window(s, spans=spans, **times) for s in range(3))])
    assert (run.windows, run.broken) == (3, 0)
    assert run.timing.hidden == pytest.approx(0.084)


def test_offenders_are_counted_and_the_last_layer_of_all_is_where_it_began(tmp_path: Path) -> None:
    naming = t.names(["b", "a", "c"]) | {"places": [1, 0, 2]}
    lines = [
        t.start(),
        naming,
        t.window(0, skipped=True, nonfinite=[[1, 2], [0, 5]]),
        t.window(1),
        t.window(2, skipped=True, nonfinite=[[1, 9]]),
        t.window(3, skipped=True, nonfinite=[[0, 7], [1, 1], [2, 1]]),
    ]
    run = read(tmp_path, lines)
    found = {
        o.name: (o.windows, o.began, o.first_x, o.last_x, o.most) for o in run.worst_offenders()
    }
    assert found == {"a": (3, 1, 0, 3, 9), "b": (2, 1, 0, 3, 7), "c": (1, 1, 3, 3, 1)}
    assert list(found) == ["a", "b", "c"]
    assert run.origins == {"a": 1, "b": 1, "c": 1}


def test_first_says_exactly_where_it_began_and_a_bad_loss_is_no_layers_fault(
    tmp_path: Path,
) -> None:
    first = {"where": "forward", "module": "m.fc", "class": "Linear", "micro_batch": 1}
    first |= {"input": [-3.0, "inf"], "output": None, "text": "boom"}
    both = {"nonfinite": [[0, 5], [1, 2]]}
    lines = [
        t.start(),
        t.names(["m.fc.weight", "m.out.weight"]),
        t.window(0, skipped=True, first=first, loss_nonfinite=1, **both),
        t.window(1, skipped=True, loss_nonfinite=2, **both),
        t.window(2, skipped=True, first=first | {"module": "elsewhere"}),
        t.window(3, skipped=True, first=first | {"where": "loss", "module": ""}, **both),
    ]
    run = read(tmp_path, lines)
    assert run.origins == {"m.fc.weight": 1, "the loss": 2, "elsewhere": 1}
    assert [o.began for o in run.offenders.values()] == [1, 0]
    assert (run.loss_windows, run.loss_first_x, run.loss_last_x) == (2, 0, 1)
    assert [x for x, _ in run.firsts] == [0, 2, 3]
    assert run.firsts[0][1] == first | {"input": (-3.0, math.inf)}


@pytest.mark.parametrize("count", [1, 1024, 1025, 5000])
def test_bins_hold_every_window_once_whatever_their_number(count: int) -> None:
    rng = random.Random(count)
    bins = samples.Bins()
    norms = [rng.lognormvariate(0, 2) for _ in range(count)]
    for x, norm in enumerate(norms):
        scale = 2.0 ** (x % 7)
        bins.add(x, Record(x, scale, scale, x % 5 == 0, norm, max_norm=float(x)))
    done = bins.done
    assert len(done) <= samples.MAX_BINS
    assert [b.windows for b in done[:-1]] == [bins.width] * (len(done) - 1)
    assert [b.x for b in done[1:]] == [b.last_x + 1 for b in done[:-1]]
    for b in done:
        part, scales = norms[b.x : b.last_x + 1], [2.0 ** (x % 7) for x in range(b.x, b.last_x + 1)]
        assert b.windows == b.norm.count == len(part)
        assert (b.norm.low, b.norm.high) == (min(part), max(part))
        assert b.norm.logs == pytest.approx(sum(map(math.log, part)))
        assert b.skips == sum(x % 5 == 0 for x in range(b.x, b.last_x + 1))
        assert (b.scale_low, b.scale_high) == (min(scales), max(scales))
        assert (b.scale, b.max_norm) == (scales[-1], b.last_x)
    assert done[-1].last_x == count - 1


def test_norm_columns_are_evenly_spread_and_exact(tmp_path: Path) -> None:
    lines = [t.start(), t.names(["a", "b"])]
    lines += [t.window(s, norms=t.norms([s, s / 2])) for s in range(1000)]
    run = read(tmp_path, lines)
    assert run.norms.stride == 8
    assert [x for x, _, _ in run.norms.columns] == list(range(0, 1000, 8))
    assert all(list(norms) == [x, x / 2] for x, _, norms in run.norms.columns)


def test_norms_are_inf_and_nan_as_the_format_writes_them(tmp_path: Path) -> None:
    lines = [t.start(), *(t.window(i, grad_norm=n) for i, n in enumerate(["inf", "nan", None, 2]))]
    run = read(tmp_path, lines)
    assert (run.stepped_bad, run.stepped_bad_x, run.highest) == (2, 0, (2.0, 3))
    assert [(b.norm.count, b.norm.bad) for b in run.bins.done] == [(0, 1), (0, 1), (0, 0), (1, 0)]


# Sessions, and what is lost of a file.


def test_sessions_in_one_file_go_on_along_the_axis(tmp_path: Path) -> None:
    one = t.story(10, lambda *_: False, with_times=True)[:-1]
    two = t.story(5, lambda *_: False, with_times=True)
    run = read(tmp_path, [*one, '{"kind":"window","step":10,"ti', *two])
    assert [s.first_x for s in run.sessions] == [0, 10]
    assert [s.windows for s in run.sessions] == [10, 5]
    assert [s.ended for s in run.sessions] == [False, True]
    assert run.broken == 1
    assert run.bins.done[-1].last_x == 14
    assert run.place(12) == "step 2 of session 2"


def test_a_session_that_ended_without_a_window_is_none(tmp_path: Path) -> None:
    """The launcher attaches, then the script with settings of its own: one run, not two."""
    story = t.story(5, lambda *_: False)
    run = read(tmp_path, [t.start(settings={"min_scale": 4.0}), t.end(), *story])
    assert len(run.sessions) == 1
    assert run.sessions[0].settings["min_scale"] == story[0]["settings"]["min_scale"] != 4.0
    assert run.place(3) == "step 3"
    again = read(tmp_path, [*story, t.start(), t.end(), *story])
    assert [s.first_x for s in again.sessions] == [0, 5]
    assert again.place(7) == "step 2 of session 2"


def test_a_session_without_a_window_that_failed_or_was_cut_off_is_kept(tmp_path: Path) -> None:
    story = t.story(5, lambda *_: False)
    run = read(tmp_path, [t.start(), t.end(error="no"), t.start(), *story, t.start(), t.end()])
    assert [s.windows for s in run.sessions] == [0, 0, 5, 0]


@pytest.mark.parametrize("lost", ['{"kind":"names","names":5}', '{"kind":"names","na', '{"kin'])
def test_norms_are_never_read_with_names_that_may_be_others(lost: str, tmp_path: Path) -> None:
    bad = {"norms": t.norms([1.0, 1.0]), "nonfinite": [[0, 1]]}
    lines = [t.start(), t.names(["a", "b"]), t.window(0, skipped=True, **bad), lost]
    run = read(tmp_path, [*lines, t.window(1, skipped=True, **bad)])
    assert (run.broken, run.skips) == (1, 2)
    assert len(run.norms.columns) == 1
    assert run.offenders["a"].windows == 1


BAD = {
    "cut off": json.dumps(t.window(2))[:-20],
    "a scale that is none": json.dumps(t.window(2, scale=-1.0)),
    "a step that was": json.dumps(t.window(0) | {"step": -3}),
    "the same step": json.dumps(t.window(1)),
    "norms of others": json.dumps(t.window(2, norms=t.norms([1.0]))),
    "not an object": "[1, 2]",
    "binary": bytes(range(11, 256)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_line_is_counted_and_skipped(name: str, tmp_path: Path) -> None:
    odd = [{"kind": "weather", "sky": "blue"}, "", t.window(2, skipped=True)]  # no fault
    lines = [t.start(), t.names(["a", "b"]), t.window(1), BAD[name], *odd]
    run = read(tmp_path, lines)
    assert run.broken == 1
    assert run.broken_first is not None
    assert run.broken_first[0] == 4
    assert len(run.broken_first[1]) < 200
    assert (run.windows, run.skips, run.sessions[0].last_step) == (2, 1, 2)


@pytest.mark.parametrize("content", [b"", b"\n \n", b'{"kind":"start","form'])
def test_an_empty_file_and_a_lone_cut_off_start_are_runs_without_windows(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert read_run(path).windows == 0


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"hello\nworld\n", "not JSON"),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "not JSON"),
        (b'{"loss": 1.0}\n', "without kind"),
        (b'{"kind":"window","step":0}\n', "window"),
        (b'{"kind":"weather"}\n', "another line first"),
        (b'{"kind":"start"}\n', "format"),
        (b"x" * (LONGEST_LINE + 10), "not JSON"),
    ],
)
def test_what_is_not_telemetry_is_refused_in_one_line(
    content: bytes, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 1: not a telemetry file of accel_scaler: found")
    assert found in text
    assert '"format":1' in text
    assert "\n" not in text


def test_a_newer_format_is_refused_with_the_newest_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: telemetry of format 2, .* is 1; upgrade"):
        read(tmp_path, [t.start(format=2), t.window(0)])


@pytest.mark.parametrize("path", [".", "nowhere.jsonl"])
def test_what_cannot_be_read_is_one_line(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / path)


def peak_of(path: Path) -> tuple[int, Run]:
    tracemalloc.start()
    run = read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, run


def test_a_line_of_a_hundred_megabytes_is_never_held_whole(tmp_path: Path) -> None:
    path = t.write(tmp_path / "run.jsonl", [t.start(), t.window(0)])
    with open(path, "ab") as file:
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + json.dumps(t.window(1)).encode() + b"\n")
    peak, run = peak_of(path)
    assert run.windows == 2
    assert run.broken >= 1
    assert peak < 6 * LONGEST_LINE


def test_memory_does_not_grow_with_the_number_of_windows(tmp_path: Path) -> None:
    """From 2,500 to 7,500 windows: the aggregates are full at the first and stay so."""
    peaks = []
    for count in (2_500, 7_500):
        extra = {"norms": t.norms([1.0]), "nonfinite": [[0, 1]], "next_scale": 65536.0}
        lines = [json.dumps(t.window(s, skipped=s % 50 == 0, **extra)) for s in range(count)]
        path = t.write(tmp_path / "run.jsonl", [t.start(), t.names(["a"]), *lines])
        del lines
        peak, run = peak_of(path)
        peaks.append(peak)
        assert run.windows == count
    assert peaks[1] < 1.15 * peaks[0] + 100_000
