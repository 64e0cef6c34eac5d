"""The recipes' sick models: well in fp32, sick in fp16, well again with what they name in fp32."""

from __future__ import annotations

from functools import cache

import pytest
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
    cured = train(sick, fp32_modules=sick.cure)
    assert close(cured, well)
    assert cured.skips <= 5
    assert sick.cure
    assert share(sick, sick.cure) <= 0.05


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
    assert 1 <= healed.skips == plain.skips <= 16
    assert close(plain, train(control, "no"))


def test_a_loss_that_the_script_spoils_is_no_modules_fault() -> None:
    well = train(NO_MODULE, "no")
    assert well.after < 0.75 * well.before
    run = train(few(NO_MODULE, 8), find_overflow="always", heal=True)
    assert run.skips == 8
    assert run.records.healed == ()
    assert {each.first["where"] for each in run.records.records} == {"loss"}
