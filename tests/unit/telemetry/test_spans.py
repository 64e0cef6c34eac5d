"""Spans of the training thread: their order and bounds, never their lengths."""

from __future__ import annotations

import pickle

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
    pickle.loads(pickle.dumps(model))(x)  # a copy is not watched
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert kinds(timeline) == []


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
