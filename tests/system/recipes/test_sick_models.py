"""The recipes' sick models: well in fp32, sick in fp16, well again with what they name in fp32."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from sick_runs import HEALTHY, NO_MODULE, SICK, SickRun, close, few, share, train
from support import same

pytestmark = pytest.mark.slow


@cache
def in_fp32(name: str) -> SickRun:
    """The reference."""
    return train(SICK[name], "no")


@pytest.mark.parametrize("name", SICK)
def test_a_sick_model_learns_in_fp32_not_in_fp16_and_with_its_cure_as_in_fp32(name: str) -> None:
    sick, well = SICK[name], in_fp32(name)
    assert well.after < 0.75 * well.before
    ill = train(few(sick, 50), min_scale=1.0)
    assert ill.skips > 0.9 * 50
    assert not close(ill, well)
    cured = train(sick, by_hand=sick.cure)
    assert close(cured, well)
    assert cured.skips <= 5
    assert sick.cure
    assert share(sick, sick.cure) <= 0.05


@pytest.mark.parametrize("name", SICK)
def test_no_part_of_a_cure_can_be_left_out(name: str) -> None:
    sick = few(SICK[name], 8)
    for left_out in sick.cure:
        part = [each for each in sick.cure if each != left_out]
        assert train(sick, by_hand=part, min_scale=1.0).skips >= 7


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("name", SICK)
def test_the_cure_as_a_setting_is_the_cure_by_hand_bit_for_bit(name: str, mode: str) -> None:
    sick = few(SICK[name], 6)
    by_hand = train(sick, by_hand=sick.cure)
    kept = train(sick, fp32_modules=sick.cure, step_mode=mode)
    assert same(kept.model.state_dict(), by_hand.model.state_dict())
    assert kept.skips == by_hand.skips <= 2


@pytest.mark.parametrize("how", ["auto", "always", "replay"])
@pytest.mark.parametrize("name", SICK)
def test_the_search_begins_in_what_has_to_be_in_fp32(name: str, how: str) -> None:
    run = train(few(SICK[name], 2), find_overflow=how, max_consecutive_skips=9)
    watched_from = 1 if how == "auto" else 0
    first: Any = run.records.records[watched_from].first
    assert first["module"] in SICK[name].cure
    assert first["where"] in ("forward", "backward")


@pytest.mark.parametrize("name", SICK)
def test_a_sick_model_heals_itself_in_the_same_run(name: str) -> None:
    sick = SICK[name]
    healed = train(sick, heal=True)
    assert close(healed, in_fp32(name))
    assert healed.skips <= 8
    assert set(healed.records.healed) == set(sick.cure)
    assert share(sick, healed.records.healed) <= 0.05


@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_control_nothing_is_healed(name: str) -> None:
    control = HEALTHY[name]
    healed, plain = train(control, heal=True), train(control)
    assert healed.records.healed == ()
    assert same(healed.model.state_dict(), plain.model.state_dict())
    assert healed.skips == plain.skips


def test_no_module_is_healed_for_a_loss_that_the_script_spoils() -> None:
    run = train(few(NO_MODULE, 12), heal=True)
    assert run.records.healed == ()
    assert run.skips == 12


@pytest.mark.parametrize("name", HEALTHY)
def test_a_control_gets_well_by_itself(name: str) -> None:
    control = HEALTHY[name]
    run = train(control)
    assert 1 <= run.skips <= 16
    assert close(run, train(control, "no"))
    assert not control.cure


def test_a_loss_that_the_script_spoils_is_no_modules_fault() -> None:
    well = train(NO_MODULE, "no")
    assert well.after < 0.75 * well.before
    run = train(few(NO_MODULE, 8), find_overflow="always")
    assert run.skips == 8
    assert {each.first["where"] for each in run.records.records} == {"loss"}


@pytest.mark.parametrize("name", [*SICK, *HEALTHY])
def test_models_and_batches_are_the_same_on_each_call_and_take_no_random_number(name: str) -> None:
    sick: Any = {**SICK, **HEALTHY}[name]
    state = torch.get_rng_state()
    one, other = sick.make().state_dict(), sick.make().state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for mine, theirs in zip(*([next(sick.batches(3))] for _ in range(2)), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not all(
        torch.equal(a, b)
        for a, b in zip(next(sick.batches(3)).values(), next(sick.batches(4)).values(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_the_models_cover_the_ways_to_train() -> None:
    everyone = SICK.values()
    assert len(SICK) == 12
    assert {each.loss_in_model for each in everyone} == {True, False}
    assert {each.optimizer for each in everyone} == {torch.optim.AdamW, torch.optim.SGD}
    assert any(each.accumulate > 1 for each in everyone)
    assert any(getattr(each.make(), "checkpoints", False) for each in everyone)
