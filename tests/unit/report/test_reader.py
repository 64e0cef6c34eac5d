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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler.errors import ConfigError
from accel_scaler.report import run_summary, samples
from accel_scaler.report.reader import read_run
from accel_scaler.telemetry.decoding import MAX_LINE, clean

FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read(tmp_path: Path, lines: list[Any]) -> run_summary.Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def attempt(path: Path) -> run_summary.Run | str:
    """The run, or the refusal's text."""
    try:
        return read_run(path)
    except ConfigError as error:
        return str(error)


def test_totals_equal_those_of_the_windows(tmp_path: Path) -> None:
    lines = t.story(700, lambda step, scale: step < 3 or step % 90 == 89, with_spans=True)
    windows = [line for line in lines if line["kind"] == "window"]
    run = read(tmp_path, lines)
    norms = [w["grad_norm"] for w in windows if w["grad_norm"] != "inf"]
    assert run.windows == len(windows) == 700
    assert run.skips == run.overflows == sum(w["skipped"] for w in windows) == 10
    assert run.highest is not None
    assert run.highest == (
        max(norms),
        windows.index(next(w for w in windows if w["grad_norm"] == max(norms))),
    )
    assert (run.limited, run.clipped) == (len(norms), sum(norm > 1.0 for norm in norms))
    assert run.norms_bad == 10
    assert run.stepped_bad == 0
    assert run.timing.optimizer_us == 30_000 * 700
    assert run.timing.totals == {
        kind: 700 * length
        for kind, length in {
            "forward": 30_000,
            "backward": 55_000,
            "clip": 5_000,
            "step": 2_000,
            "optimizer": 30_000,
            "wait": 2_000,
        }.items()
    }
    assert run.timing.waits == {"transformer.h.0": 700 * 2_000}
    assert run.sessions[0].ended
    assert run.broken == 0


def test_every_change_of_scale_is_kept_with_its_step(tmp_path: Path) -> None:
    lines = t.story(200, lambda step, scale: scale > 16384, growth_interval=50)
    run = read(tmp_path, lines)
    expected = [(0, 65536.0)]
    for w in lines:
        if w["kind"] == "window" and w["next_scale"] != expected[-1][1]:
            expected.append((w["step"] + 1, w["next_scale"]))
    assert run.changes == expected
    assert len(expected) > 5


def test_offenders_are_counted_and_the_last_layer_of_all_is_where_it_began(tmp_path: Path) -> None:
    names = ["b", "a", "c"]
    naming = t.names(names) | {"places": [1, 0, 2]}
    lines = [
        t.start(),
        naming,
        t.window(0, skipped=True, nonfinite=[[0, 5], [1, 2]]),
        t.window(1),
        t.window(2, skipped=True, nonfinite=[[1, 9]]),
        t.window(3, skipped=True, nonfinite=[[2, 1], [0, 7], [1, 1]]),
    ]
    run = read(tmp_path, lines)
    found = {
        o.name: (o.windows, o.began, o.first_x, o.last_x, o.most) for o in run.offenders.values()
    }
    assert found == {"b": (2, 1, 0, 3, 7), "a": (3, 1, 0, 3, 9), "c": (1, 1, 3, 3, 1)}
    assert run.culprits == {"a": 1, "b": 1, "c": 1}


def test_first_says_exactly_where_it_began_and_a_bad_loss_is_no_layers_fault(
    tmp_path: Path,
) -> None:
    first = {"where": "forward", "module": "m.fc", "class": "Linear", "micro_batch": 1}
    first |= {"input": [-3.0, "inf"], "output": None, "text": "boom"}
    lines = [
        t.start(),
        t.names(["m.fc.weight", "m.out.weight"]),
        t.window(0, skipped=True, nonfinite=[[0, 5], [1, 2]], first=first, loss_nonfinite=1),
        t.window(1, skipped=True, nonfinite=[[0, 5], [1, 2]], loss_nonfinite=2),
        t.window(2, skipped=True, first=first | {"module": "elsewhere"}),
    ]
    run = read(tmp_path, lines)
    assert run.culprits == {"m.fc.weight": 1, "the loss": 1, "elsewhere": 1}
    assert [o.began for o in run.offenders.values()] == [1, 0]
    assert (run.loss_windows, run.loss_first_x, run.loss_last_x) == (2, 0, 1)
    assert [f.x for f in run.firsts] == [0, 2]
    assert run.firsts[0].input == (-3.0, math.inf)


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2049, 5000])
def test_bins_hold_every_window_once_whatever_their_number(count: int) -> None:
    rng = random.Random(count)
    bins = samples.Bins()
    norms = [rng.lognormvariate(0, 2) for _ in range(count)]
    for x, norm in enumerate(norms):
        bins.add(x, 2.0 ** (x % 7), x % 5 == 0, norm, 1.0)
    done = bins.done
    assert len(done) <= samples.MAX_BINS
    assert [b.windows for b in done[:-1]] == [bins.width] * (len(done) - 1)
    for b in done:
        part = norms[b.x : b.last_x + 1]
        assert b.windows == b.norms == len(part)
        assert (b.norm_low, b.norm_high) == (min(part), max(part))
        assert b.norm == pytest.approx(math.prod(p ** (1 / len(part)) for p in part))
        assert b.skips == sum(x % 5 == 0 for x in range(b.x, b.last_x + 1))
        assert b.scale_high == max(2.0 ** (x % 7) for x in range(b.x, b.last_x + 1))
    assert done[-1].last_x == count - 1


def test_norm_columns_are_evenly_spread_and_exact(tmp_path: Path) -> None:
    count = 1000
    lines = [t.start(), t.names(["a", "b"])]
    lines += [t.window(s, norms=t.norms([s, s / 2])) for s in range(count)]
    run = read(tmp_path, lines)
    xs = [x for x, _, _ in run.heat.columns]
    assert run.heat.stride == 8
    assert xs == list(range(0, count, 8))
    assert all(list(norms) == [x, x / 2] for x, _, norms in run.heat.columns)


def test_the_stretch_is_eight_windows_in_a_row_from_the_middle_half(tmp_path: Path) -> None:
    for count in (1, 7, 8, 100, 517, 1000):
        run = read(tmp_path, t.story(count, lambda *_: False, with_spans=True, with_norms=False))
        stretch = run.timing.stretch
        assert stretch is not None
        assert stretch.windows == min(count, 8)
        assert stretch.last_x - stretch.first_x == stretch.windows - 1
        assert len(stretch.spans) == 6 * stretch.windows
        if count >= 100:
            assert 0.25 * count <= stretch.first_x <= 0.75 * count


def test_sessions_in_one_file_go_on_along_the_axis(tmp_path: Path) -> None:
    one = t.story(10, lambda *_: False)[:-1]
    two = t.story(5, lambda *_: False)
    run = read(tmp_path, [*one, '{"kind":"window","step":10,"ti', *two])
    assert [s.first_x for s in run.sessions] == [0, 10]
    assert [s.windows for s in run.sessions] == [10, 5]
    assert [s.ended for s in run.sessions] == [False, True]
    assert run.broken == 1
    assert run.bins.done[-1].last_x == 14
    assert run.place(12) == "step 2 of session 2"


def test_a_lost_start_line_begins_a_session_all_the_same(tmp_path: Path) -> None:
    lines = [*t.story(10, lambda *_: False), *t.story(5, lambda *_: False)[2:]]
    run = read(tmp_path, lines)
    assert [(s.first_x, s.started) for s in run.sessions] == [(0, True), (10, False)]
    # Names go with the start line that was lost: norms must not be read with the old ones.
    assert run.nameless == 5


def good_window(**changes: Any) -> str:
    return json.dumps(t.window(1) | changes)


BAD = {
    "cut off": good_window()[:-20],
    "not an object": "[1, 2]",
    "no kind": '{"step": 1}',
    "kind of a wrong type": '{"kind": ["window"]}',
    "not UTF-8": b'{"kind":"window","step":\xff}',
    "binary": bytes(range(11, 256)),
    "NaN literal": good_window().replace("1.25", "NaN"),
    "step as text": good_window(step="1"),
    "step true": good_window(step=True),
    "negative step": good_window(step=-1),
    "step beyond all": good_window(step=10**12),
    "step with 5,000 digits": good_window().replace('"step": 1', '"step": 1' + "0" * 5000),
    "scale missing": good_window(scale=None),
    "negative scale": good_window(scale=-2.0),
    "scale inf": good_window(scale="inf"),
    "scale 1e999": good_window().replace("65536.0", "1e999"),
    "scale of 400 digits": good_window(scale=10**400),
    "skipped as a number": good_window(skipped=1),
    "norm as a word": good_window(grad_norm="large"),
    "negative norm": good_window(grad_norm=-1.0),
    "norm -inf": good_window(grad_norm="-inf"),
    "time NaN": good_window(time="nan"),
    "lr no list": good_window(lr=0.1),
    "lr of texts": good_window(lr=["0.1"]),
    "lr nan": good_window(lr=["nan"]),
    "tracker": good_window(growth_tracker=1.5),
    "coefficient": good_window(clip_coefficient=[]),
    "norms too short": good_window(norms=t.norms([1.0])),
    "norms of nine bytes": good_window(norms="A" * len(t.norms([1.0, 2.0]))),
    "norms no text": good_window(norms=[1.0, 2.0]),
    "norms not base64": good_window(norms="!" * len(t.norms([1.0, 2.0]))),
    "norms not ASCII": good_window(norms="é" * len(t.norms([1.0, 2.0]))),
    "norms below 0": good_window(norms=t.norms([1.0, -2.0])),
    "index out of range": good_window(nonfinite=[[2, 1]]),
    "negative index": good_window(nonfinite=[[-1, 1]]),
    "index twice": good_window(nonfinite=[[0, 1], [0, 1]]),
    "more elements than there are": good_window(nonfinite=[[0, 5000]]),
    "no pair": good_window(nonfinite=[[0]]),
    "offenders a number": good_window(nonfinite=3),
    "share above 1": good_window(underflow=[[0, 1.5, 0.0]]),
    "share NaN": good_window(underflow=[[0, "nan", 0.0]]),
    "span of an unknown kind": good_window(spans=[["lunch", 0, 1]]),
    "span of an unhashable kind": good_window(spans=[[["forward"], 0, 1]]),
    "span of negative length": good_window(spans=[["forward", 0, -1]]),
    "span of a fraction": good_window(spans=[["forward", 0, 1.5]]),
    "span of an age": good_window(spans=[["forward", 0, 10**18]]),
    "span too short": good_window(spans=[["forward", 0]]),
    "where as a number": good_window(spans=[["wait", 0, 1, 5]]),
    "update of negative length": good_window(optimizer_us=-5),
    "losses as text": good_window(loss_nonfinite="3"),
    "first no object": good_window(first=[1]),
    "first of an unhashable place": good_window(first={"where": []}),
    "first with a bad range": good_window(first={"where": "loss", "input": [1]}),
    "first with a range of texts": good_window(first={"where": "loss", "input": ["a", "b"]}),
    "deep nesting": '{"kind":"window","a":' + "[" * 200_000,
    "names no list": '{"kind":"names","names":"abc"}',
    "names of unequal lengths": '{"kind":"names","names":["a"],"places":[],"elements":[1]}',
    "end of a wrong time": '{"kind":"end","time":"soon"}',
    "error as a number": '{"kind":"end","time":1,"error":5}',
    "start of an unknown kind of format": '{"kind":"start","format":"one"}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_line_is_counted_and_skipped(name: str, tmp_path: Path) -> None:
    lines = [t.start(), t.names(["a", "b"]), t.window(0), BAD[name], t.window(2, skipped=True)]
    run = read(tmp_path, lines)
    assert run.broken == 1
    assert run.broken_first is not None
    assert run.broken_first[0] == 4
    assert len(run.broken_first[1]) < 200
    assert (run.windows, run.skips, run.sessions[0].last_step) == (2, 1, 2)


def test_unknown_keys_and_kinds_are_no_fault(tmp_path: Path) -> None:
    odd = [{"kind": "weather", "sky": "blue"}, t.window(1, colour="red"), ""]
    run = read(tmp_path, [t.start(), t.window(0), *odd])
    assert (run.windows, run.broken) == (2, 0)


def test_norms_are_inf_and_nan_as_the_format_writes_them(tmp_path: Path) -> None:
    lines = [t.start(), *(t.window(i, grad_norm=n) for i, n in enumerate(["inf", "nan", None, 2]))]
    run = read(tmp_path, lines)
    assert (run.norms, run.norms_bad, run.stepped_bad, run.stepped_bad_x) == (3, 2, 2, 0)
    assert run.highest == (2.0, 3)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n", b'{"kind":"start","form'])
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
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "not UTF-8"),
        (b'{"loss": 1.0}\n', "an object without kind"),
        (b"[1, 2]\n", "a list"),
        (b'{"kind":"window","step":0}\n', "a line of kind 'window'"),
        (b'{"kind":"start"}\n', "a line of kind 'start'"),
        (b"x" * (MAX_LINE + 10), "longer than 8 MiB"),
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


@pytest.mark.parametrize("path", [".", "nowhere.jsonl", "a/b/c"])
def test_what_cannot_be_read_is_one_line(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / path)


def test_a_line_of_a_hundred_megabytes_is_never_held_whole(tmp_path: Path) -> None:
    path = t.write(tmp_path / "run.jsonl", [t.start(), t.window(0)])
    with open(path, "ab") as file:
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + json.dumps(t.window(1)).encode() + b"\n")
    tracemalloc.start()
    run = read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (run.windows, run.broken) == (2, 1)
    assert peak < 4 * MAX_LINE


def test_memory_does_not_grow_with_the_number_of_windows(tmp_path: Path) -> None:
    """From 4,000 to 12,000 windows: the aggregates are full at the first and stay so."""
    peaks = []
    for count in (4_000, 12_000):
        lines: list[Any] = [t.start(), t.names(["a"])]
        extra = {"norms": t.norms([1.0]), "nonfinite": [[0, 1]]}
        lines += [
            json.dumps(t.window(s, skipped=s % 50 == 0, next_scale=65536.0, **extra))
            for s in range(count)
        ]
        path = t.write(tmp_path / "run.jsonl", lines)
        del lines
        tracemalloc.start()
        run = read_run(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert run.windows == count
        assert len(run.changes) <= run_summary.MAX_CHANGES
    assert peaks[1] < 1.15 * peaks[0] + 100_000


def test_text_from_the_file_is_one_line_and_short() -> None:
    assert clean("a.b") == "a.b"
    assert clean("a\x00b\n\u202ec\ud800") == "a\ufffdb\ufffd\ufffdc\ufffd"
    long = [clean("n" * 5_000 + tail + "n" * 5_000) for tail in "xy"]
    assert all(len(text) <= 160 for text in long)
    assert long[0] != long[1]


@FUZZ
@given(data=st.binary(max_size=400))
def test_random_bytes_after_a_start_line_never_raise(data: bytes, tmp_path: Path) -> None:
    path = t.write(tmp_path / "run.jsonl", [t.start(), t.names(), t.window(0)])
    with open(path, "ab") as file:
        file.write(data)
    run = read_run(path)
    assert run.windows == 1


@FUZZ
@given(data=st.binary(max_size=200))
def test_random_bytes_alone_are_refused_or_empty(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    run = attempt(path)
    assert "\n" not in run if isinstance(run, str) else run.windows == 0


SAMPLE = t.story(12, lambda step, _: step < 2, with_spans=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@FUZZ
@given(
    index=st.integers(0, len(SAMPLE) - 1), pick=st.integers(0, 30), value=VALUES, cut=st.integers(0)
)
def test_mutated_fields_never_raise_anything_but_a_refusal(
    index: int, pick: int, value: object, cut: int, tmp_path: Path
) -> None:
    changed = dict(SAMPLE[index])
    changed[sorted(changed)[pick % len(changed)]] = value
    lines: list[Any] = list(SAMPLE)
    lines[index] = json.dumps(changed)  # NaN and Infinity literals too
    raw = t.write(tmp_path / "run.jsonl", lines).read_bytes()
    (tmp_path / "run.jsonl").write_bytes(raw[: len(raw) - cut % 50])
    run = attempt(tmp_path / "run.jsonl")
    if isinstance(run, str):
        assert index == 0
        assert "\n" not in run
        return
    assert run.windows <= 12
    assert run.windows + run.broken >= 11


@FUZZ
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), length=st.integers(0, 40))
def test_flipped_bytes_never_raise_anything_but_a_refusal(
    place: int, byte: int, length: int, tmp_path: Path
) -> None:
    path = t.write(tmp_path / "run.jsonl", SAMPLE)
    raw = bytearray(path.read_bytes())
    place %= len(raw)
    raw[place : place + length] = bytes([byte])
    path.write_bytes(raw)
    run = attempt(path)
    assert "\n" not in run if isinstance(run, str) else run.windows <= 13
