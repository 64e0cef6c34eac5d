"""Spans of the training thread: their order and bounds, never their lengths."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler.telemetry.spans import MOST_SPANS, Timeline


def kinds(timeline: Timeline) -> list[str]:
    return [span[0] for span in timeline.take()]


def test_spans_come_in_order_and_only_once() -> None:
    timeline = Timeline()
    with timeline.span("clip"):
        pass
    with timeline.span("step"):
        pass
    (one, start, length), (two, later, _) = timeline.take()
    assert (one, two) == ("clip", "step")
    assert start + length <= later
    assert timeline.take() == []


def test_a_span_ends_also_with_an_error() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("backward"):
        raise KeyError
    assert kinds(timeline) == ["backward"]


def test_spans_of_one_window_are_bounded() -> None:
    timeline = Timeline()
    for _ in range(MOST_SPANS + 10):
        with timeline.span("backward"):
            pass
    assert len(timeline.take()) == MOST_SPANS
    with timeline.span("backward"):
        pass
    assert kinds(timeline) == ["backward"]


def test_training_forwards_are_spans_and_others_are_not() -> None:
    timeline, model = Timeline(), nn.Linear(2, 1)
    timeline.watch(model)
    timeline.watch(model)
    x = torch.zeros(1, 2)
    model(x)
    assert kinds(timeline) == ["forward"]
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert kinds(timeline) == []


def test_the_span_of_a_forward_holds_what_runs_inside_it() -> None:
    timeline = Timeline()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with timeline.span("inner"):
                return x

    model = Model()
    timeline.watch(model)
    model(torch.zeros(1))
    (_, start, length), (kind, outer, whole) = timeline.take()
    assert kind == "forward"
    assert outer <= start
    assert start + length <= outer + whole


def test_a_forward_that_failed_leaves_no_span_in_the_next() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.numel() == 0:
                raise ValueError("empty")
            return x

    timeline, model = Timeline(), Model()
    timeline.watch(model)
    with pytest.raises(ValueError, match="empty"):
        model(torch.zeros(0))
    model(torch.zeros(1))
    assert kinds(timeline) == ["forward"]


def test_closing_removes_the_hooks() -> None:
    timeline, model = Timeline(), nn.Linear(2, 1)
    timeline.watch(model)
    timeline.close()
    timeline.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model(torch.zeros(1, 2))
    assert kinds(timeline) == []


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_copied_model_runs_and_is_not_watched(again: Any) -> None:
    timeline, model = Timeline(), nn.Linear(2, 1)
    timeline.watch(model)
    other = again(model)
    assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert kinds(timeline) == ["forward"]


def test_it_keeps_no_model_alive_nor_the_model_it() -> None:
    timeline, model, kept = Timeline(), nn.Linear(2, 1), nn.Linear(2, 1)
    timeline.watch(model)
    timeline.watch(kept)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    left = weakref.ref(timeline)
    del timeline
    gc.collect()
    assert left() is None
    kept(torch.ones(1, 2))  # its hooks find nobody
