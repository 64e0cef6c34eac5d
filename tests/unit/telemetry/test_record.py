"""The schema: every field of a line, out and in again, and what is no line."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.telemetry.record import (
    FORMAT,
    BrokenLineError,
    End,
    Noted,
    Record,
    Start,
    decode,
    encode_line,
    encode_noted,
    encode_window,
)

INF, NAN = math.inf, math.nan
FULL = Record(
    index=3,
    scale=65536.0,
    next_scale=32768.0,
    skipped=True,
    grad_norm=1.25,
    found_inf=True,
    growth_tracker=7,
    max_norm=1.0,
    clip_coefficient=0.8,
    lr=(0.001, None),
    names=("a", "b"),
    norms=(0.75, 1.0),
    overflowed=("b",),
    loss_nonfinite=3,
    first={"where": "forward", "module": "m", "class": "Linear", "micro_batch": 0}
    | {"input": (-1.0, 2.0), "output": None, "text": "it began"},
    time=0.5,
    optimizer_us=1234,
    waited_us=10,
    healed=("block.wo",),
    retries=2,
    first_scale=262144.0,
    retry_us=900,
    loss=2.5,
)
BARE = Record(index=0, scale=8.0, next_scale=8.0, skipped=False, grad_norm=None)


def test_a_window_line_has_every_number_under_its_name() -> None:
    """The numbers of JSON; the parameters' names have a line of their own."""
    expected = json.loads(json.dumps(dataclasses.asdict(FULL)))
    del expected["names"]
    line = json.loads(encode_window(FULL))
    assert (line.pop("kind"), line.pop("step")) == ("window", expected.pop("index"))
    assert line == {key: value for key, value in expected.items() if value not in (None, False)}


@pytest.mark.parametrize("record", [FULL, BARE], ids=["full", "bare"])
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    """Without the norms of parameters, which are for readers of the file."""
    back = dataclasses.replace(record, names=(), norms=None)
    assert decode(encode_window(record).encode()) == back


def test_a_start_and_an_end_come_back_as_they_were() -> None:
    facts = {"package": "0", "rank": 1, "ranks": 2, "device": "cpu", "precision": "fp16"}
    settings = {"min_scale": None, "scale": 2.0, "enabled": True, "telemetry": "x.jsonl"}
    line = encode_line("start", format=FORMAT, **facts, settings=settings, changed=["min_scale"])
    assert decode(line.encode()) == Start(FORMAT, facts, settings, ("min_scale",))
    noted = Noted({"eval_loss": 0.1, "test/x": -INF, "parameters": 10.0})
    assert decode(encode_noted(3, noted.values).encode()) == noted
    end = End(1.5, "StepError: it did not end")
    assert decode(encode_line("end", **dataclasses.asdict(end)).encode()) == end


def test_numbers_that_json_has_not_are_text_that_float_reads() -> None:
    record = dataclasses.replace(
        BARE,
        grad_norm=NAN,
        max_norm=INF,
        clip_coefficient=-INF,
        lr=(NAN,),
        norms=(INF, NAN),
        loss=NAN,
    )
    got = json.loads(encode_window(record), parse_constant=pytest.fail)
    keys = ("grad_norm", "max_norm", "clip_coefficient", "lr", "loss", "norms")
    assert [got[key] for key in keys] == ["nan", "inf", "-inf", ["nan"], "nan", ["inf", "nan"]]
    back = decode(encode_window(record).encode())
    assert repr(back) == repr(dataclasses.replace(record, norms=None))


def test_norms_have_six_digits() -> None:
    values = (1 / 3, 1e-30, 123456789.0, 0.0)
    (line,) = [json.loads(encode_window(dataclasses.replace(BARE, norms=values)))]
    assert line["norms"] == [0.333333, 1e-30, 123457000.0, 0.0]


def window(**changes: Any) -> str:
    return json.dumps(t.window(1) | changes)


BROKEN = {
    "cut off": window()[:-20],
    "step with 5,000 digits": window().replace('"step": 1', '"step": 1' + "0" * 5000),
    "deep nesting": '{"kind":"window","a":' + "[" * 200_000,
    "not an object": "[1, 2]",
    "no kind": '{"step": 1}',
    "step missing": json.dumps({k: v for k, v in t.window(1).items() if k != "step"}),
    "scale missing": json.dumps({k: v for k, v in t.window(1).items() if k != "scale"}),
    "norm as a word": window(grad_norm="large"),
    "noted as a word": '{"kind":"noted","step":1,"values":{"eval_loss":"low"}}',
    "start without a format": '{"kind":"start"}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_as_the_format_says_is_refused_in_a_few_words(name: str) -> None:
    with pytest.raises(BrokenLineError) as caught:
        decode(BROKEN[name].encode())
    assert 0 < len(str(caught.value)) < 200


def test_unknown_kinds_and_keys_and_another_format_are_no_fault() -> None:
    assert decode(b'{"kind":"weather","sky":"blue"}') is None
    assert isinstance(decode(window(colour="red").encode()), Record)
    for other in (FORMAT - 1, FORMAT + 1):
        assert decode(b'{"kind":"start","format":%d,"rank":"two"}' % other) == Start(other)
