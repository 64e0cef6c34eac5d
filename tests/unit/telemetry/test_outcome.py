"""The verdict: whether it trained, what stopped it, what to do; never more than is known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from accel_scaler.telemetry.history import History
from accel_scaler.telemetry.outcome import STUCK, Outcome, verdict
from accel_scaler.telemetry.record import Record

INF = math.inf
TRAINED = Outcome(windows=1200, skips=14, search_skips=14, scale=8.0, last="step 1199")
STREAK = Outcome(
    windows=400, skips=89, scale=2.0**-70, last="step 399", streak=89, trained_until="step 310"
)


def first(where: str, module: str = "", cls: str = "", given: Any = (0.0, 1.0)) -> dict[str, Any]:
    return {"where": where, "module": module, "class": cls, "input": given, "text": "it began"}


def test_a_run_that_trained() -> None:
    assert (
        verdict(TRAINED)
        == "Trained: 1,200 windows, 14 skipped (1.2 %), all while the scale settled."
    )
    assert verdict(replace(TRAINED, skips=0, search_skips=0)) == (
        "Trained: 1,200 windows, none skipped."
    )
    grown = replace(TRAINED, search_skips=0, growth_skips=14)
    assert verdict(grown).endswith("(1.2 %), all after the scale had grown.")
    both = replace(TRAINED, search_skips=10, growth_skips=4)
    assert verdict(both).endswith(
        "(1.2 %): 10 while the scale settled and 4 after the scale had grown."
    )
    others = replace(TRAINED, search_skips=9, growth_skips=1, forward_skips=2)
    assert verdict(others).endswith(
        "(1.2 %): 9 while the scale settled, 1 after the scale had grown, 2 with inf or NaN in the "
        "forward and 2 in the middle of training."
    )
    alone = replace(TRAINED, search_skips=0)
    assert verdict(alone).endswith("(1.2 %), all in the middle of training.")


def test_no_windows() -> None:
    assert verdict(Outcome()) == "Nothing was trained: no window closed."
    failed = verdict(Outcome(error="StepError: it broke. Much more."))
    assert failed == (
        "Nothing was trained: no window closed before it ended with an error: StepError: it broke."
    )
    assert verdict(Outcome(is_over=False)).endswith("it was killed, or it has just begun.")


def test_without_a_scale() -> None:
    plain = Outcome(windows=7, scaled=False, norms=7, scale=1.0)
    assert verdict(plain) == "Trained: 7 windows without loss scaling, every gradient norm finite."
    assert verdict(replace(plain, norms=0)) == "Trained: 7 windows without loss scaling."
    bad = verdict(replace(plain, stepped_bad="step 3"))
    assert bad.startswith("Trained, but the gradient norm was inf or NaN in windows that stepped")
    assert "step 3, so load a checkpoint before it" in bad
    assert "finite" not in bad


CAUSES = {
    "overflowed in the forward of a.wo (Linear); keep it in float32: fp32_modules: ['a.wo'].": [
        first("forward", "a.wo", "Linear")
    ],
    "overflowed in the forward of the model itself (Net); compute that in float32.": [
        first("forward", "", "Net")
    ],
    "overflowed in the backward of a.wo (Linear); keep it in float32: fp32_modules: ['a.wo'].": [
        first("forward", "other", "X"),
        first("backward", "a.wo", "Linear"),  # the last one counts
    ],
    "overflowed in a parameter's gradient of n (Norm); keep it in float32: fp32_modules: ['n'].": [
        first("parameter", "n", "Norm")
    ],
    "overflowed in the loss, outside of the model; compute it in float32.": [
        first("loss", "", "torch.float16")
    ],
    "overflowed in the backward of the loss; compute the loss in float32.": [
        first("backward", "", "loss")
    ],
    "got inf or NaN as the input of a (Net); look at the data of these batches.": [
        first("forward", "a", "Net", (math.nan, math.nan))
    ],
}


@pytest.mark.parametrize("said", CAUSES)
def test_a_run_that_is_stuck_names_module_and_remedy(said: str) -> None:
    text = verdict(replace(STREAK, firsts=CAUSES[said]))
    assert text == f"Did not train past step 310: every window since (89) {said}"


def test_what_is_not_finite_is_a_text_before_it_was_in_a_file() -> None:
    said = "got inf or NaN as the input of a (Net)"
    for value in ("nan", "inf", "-inf"):
        seen: Any = {**first("forward", "a", "Net"), "input": [0.0, value]}
        assert said in verdict(replace(STREAK, firsts=[seen]))


def test_a_run_that_is_stuck_for_a_reason_that_nobody_saw() -> None:
    assert verdict(STREAK).endswith(
        "overflowed; run with find_overflow='replay' to see in which module it begins."
    )
    named = verdict(replace(STREAK, origins=Counter({"a.wo.weight": 80, "b": 9})))
    assert "overflowed, first in a.wo.weight; keep its module in float32" in named
    assert "fp32_modules: ['a.wo']" in named
    assert "first in" not in verdict(replace(STREAK, origins=Counter({"a.wo.weight": 9})))
    assert "first in" not in verdict(replace(STREAK, origins=Counter({"weight": 80})))
    loss = verdict(replace(STREAK, origins=Counter({"the loss": 80})))
    assert "had a loss of inf or NaN; a smaller scale does not help" in loss
    broken = "OverflowStreakError: x. (1) parameters are inf or NaN themselves (w), so no scale"
    text = verdict(replace(STREAK, error=broken, firsts=[first("forward", "a", "B")]))
    assert "overflowed: parameters are inf or NaN themselves; load the last good" in text


def test_a_streak_at_the_end_counts_once_it_is_long_or_has_ended_the_run() -> None:
    short = replace(TRAINED, streak=STUCK - 1, trained_until="step 1180")
    assert verdict(short).startswith("Trained:")
    assert verdict(replace(short, streak=STUCK)).startswith("Did not train past step 1180")
    ended = verdict(replace(short, streak=3, error="OverflowStreakError: 3 in a row. More."))
    assert ended.startswith("Did not train past step 1180: every window since (3)")
    assert ended.endswith(
        "It ended with an error after step 1199: OverflowStreakError: 3 in a row."
    )
    other = verdict(replace(short, streak=3, error="StepError: it broke"))
    assert other.startswith("Trained:")
    assert other.endswith("It ended with an error after step 1199: StepError: it broke.")


def test_a_search_that_is_not_over_is_no_fault_of_a_module() -> None:
    begun = Outcome(windows=5, skips=5, search_skips=5, streak=5, scale=2048.0, last="step 4")
    for firsts in ([], [first("backward", "a", "Linear")]):
        assert verdict(replace(begun, firsts=firsts)) == (
            "Nothing was trained: all 5 windows overflowed while the scale was searched for, down "
            "to 2048; go on, or begin there: init_scale=2048."
        )
    forward = verdict(replace(begun, firsts=[first("forward", "a", "Linear")]))
    assert "all 5 windows overflowed in the forward of a (Linear)" in forward
    one = replace(begun, windows=1, skips=1, search_skips=1, streak=1)
    assert verdict(one).startswith("Nothing was trained: the only window overflowed")


def test_what_went_wrong_on_the_way_is_said_too() -> None:
    low = replace(TRAINED, low="the scale fell to 1 (step 9)", loss_windows=2)
    assert verdict(low).startswith(
        "Trained, but the loss itself was inf or NaN in 2 windows; the scale fell to 1 (step 9): "
    )
    going = verdict(replace(TRAINED, is_over=False))
    assert going.endswith("There is no end after step 1199: it was killed, or is still going.")


def test_a_run_that_trained_in_part_names_what_kept_it_from_it() -> None:
    part = Outcome(windows=44, skips=39, scale=2.0, last="step 43", streak=3)
    assert verdict(part) == (
        "Trained in 5 of 44 windows only. 39 were skipped (88.6 %), all in the middle of training."
    )
    seen = [first("forward", "a", "B"), first("backward", "c", "D"), first("forward", "a", "B")]
    assert verdict(replace(part, all_firsts=seen)).startswith(
        "Trained in 5 of 44 windows only: most often it overflowed in the forward of a (B); keep "
        "it in float32: fp32_modules: ['a']. 39 were skipped"
    )
    few = replace(part, skips=9, search_skips=5)
    assert verdict(replace(few, all_firsts=seen)).startswith("Trained: 44 windows, 9 skipped")


def test_a_run_that_was_healed_in_its_last_window() -> None:
    fresh = Outcome(windows=1, skips=1, search_skips=1, last="step 0", healed=["a"])
    assert verdict(fresh) == (
        "Nothing trained yet, 1 module healed: put `fp32_modules: ['a']` into the config. "
        "1 window, 1 skipped (100 %)."
    )
    (record,) = records((True, 65536.0))
    healed = replace(record, healed=("a",), loss_nonfinite=1, first=first("forward", "a", "B"))
    assert history_of(healed).verdict() == verdict(fresh)


def test_healed_modules_are_the_line_for_the_config() -> None:
    assert verdict(replace(TRAINED, healed=["a.wo", "b.wo"])) == (
        "Trained with 2 modules healed: put `fp32_modules: ['a.wo', 'b.wo']` into the config. "
        "1,200 windows, 14 skipped (1.2 %)."
    )
    stuck = verdict(replace(STREAK, healed=["a.wo"], firsts=[first("forward", "b", "L")]))
    assert stuck.startswith("Did not train past step 310")
    assert stuck.endswith("fp32_modules: ['b']. Healed before: fp32_modules: ['a.wo'].")


# Of a history.


def records(*skips: tuple[bool, float]) -> list[Record]:
    """``(skipped, next scale)`` of each, from 65536 on."""
    found, scale = [], 65536.0
    for index, (skipped, after) in enumerate(skips):
        found.append(Record(index, scale, after, skipped, None if skipped else 1.0))
        scale = after
    return found


def history_of(*found: Record) -> History:
    history = History()
    for record in found:
        history.add(record)
    return history


def test_a_history_knows_its_verdict() -> None:
    assert History().verdict() == "Nothing was trained: no window closed."
    good = [(False, 1024.0)] * 30
    trained = history_of(*records(*[(True, 2.0**k) for k in (15, 14)], *[(False, 2.0**14)] * 30))
    text = "Trained: 32 windows, 2 skipped (6.2 %), all while the scale settled."
    assert (trained.verdict(), trained.verdict()) == (text, text)  # it may be asked for again
    trained.add(replace(records(*good)[0], index=32))
    assert trained.verdict().startswith("Trained: 33 windows, 2 skipped")
    stuck = records(*good, *[(True, 512.0)] * STUCK)
    stuck[35] = replace(stuck[35], first=first("forward", "a.wo", "Linear"))
    assert history_of(*stuck).verdict() == (
        f"Did not train past window 29: every window since ({STUCK}) overflowed in the forward of "
        "a.wo (Linear); keep it in float32: fp32_modules: ['a.wo']."
    )
    named = [replace(r, overflowed=("b.weight", "c")) if r.skipped else r for r in stuck[:35]]
    assert history_of(*named).verdict().startswith("Trained in 30 of 35 windows only.")


def test_an_amended_window_counts_once() -> None:
    history = history_of(*records((False, 8.0), (False, 8.0)))
    history.add(replace(history.records[-1], skipped=True, next_scale=4.0))
    assert history.verdict().startswith("Trained: 2 windows, 1 skipped (50 %)")


def test_a_history_of_a_run_without_scale() -> None:
    found = [Record(i, 1.0, 1.0, False, norm) for i, norm in enumerate((1.0, 2.0, 3.0))]
    assert history_of(*found).verdict() == (
        "Trained: 3 windows without loss scaling, every gradient norm finite."
    )
    found[1] = replace(found[1], grad_norm=math.nan, found_inf=True)
    assert "first at window 1" in history_of(*found).verdict()
    assert "first at window 1" in history_of(*found[:2]).verdict()


def test_a_history_that_fell_to_one_and_healed() -> None:
    fell = records((True, 1.0), *[(False, 1.0)] * 30)
    fell[3] = replace(fell[3], healed=("a",))
    text = history_of(*fell).verdict()
    assert text.startswith(
        "Trained with 1 module healed, but the scale fell to 1 (window 0): put `fp32_mod"
    )
