"""Masters of float16 and bfloat16 weights, beside a plain loop with float32 masters.

A master belongs to a memory, and lives as long as the optimizer has a parameter in it: freezing,
ties by ``.data`` and edits through ``.data`` change no number. So with float32 weights, where
``offload`` has masters and the other ways have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from async_support import lazy, one_part_each
from attached import cpu
from support import same
from torch import Tensor, nn

from accel_scaler import UnsupportedError, attach, detach

STEPS = 8
WAYS = [
    {},
    {"step_mode": "overlap"},
    {"offload": "cpu"},
    {"step_mode": "overlap", "offload": "cpu"},
]
KINDS: dict[str, Callable[..., Any]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-4, momentum=0.5, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-4),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-4, fused=True),
}


class Squares(nn.Module):
    """A loss with gradients that depend on the parameters, computed in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = (6, 5), (5, 6), (70, 70), (6, 5), (3,)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
        )

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        factors = torch.rand(len(self.weights), generator=generator)
        losses = [f * w.float().square().mean() for f, w in zip(factors, self.weights, strict=True)]
        return torch.stack(losses).sum()


Change = Callable[[Squares, int], None]
"""What a loop does to its model before the step of this number."""


def groups_of(model: Squares, weights: Any = None) -> list[dict[str, Any]]:
    """Two groups, which are not in the order of use."""
    first, *rest = model.weights if weights is None else weights
    return [{"params": rest, "weight_decay": 0.0}, {"params": [first]}]


class Plain:
    """The reference: torch's optimizer over float32 copies, one for each memory."""

    def __init__(self, model: Squares, kind: str) -> None:
        self.model = model
        self.masters = [nn.Parameter(w.detach().float()) for w in model.weights]
        self.places = [0] * len(self.masters)
        self.optimizer = KINDS[kind](groups_of(model, self.masters))

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what was written to the model, and which memory it is in."""
        known = dict(zip(self.places, self.masters, strict=True))
        self.places = [w.data_ptr() for w in self.model.weights]
        for w, master, place in zip(self.model.weights, self.masters, self.places, strict=True):
            master.data = known.setdefault(place, nn.Parameter(master.detach().clone())).data
            master.copy_(torch.where(master.to(w.dtype) == w, master, w.float()))

    def step(self, number: int) -> None:
        self.follow()
        self.model.zero_grad()
        (self.model(number) * 8.0).backward()
        for w, master in zip(self.model.weights, self.masters, strict=True):
            master.grad = None if w.grad is None else w.grad.float() / 8.0
        self.optimizer.step()
        for w, master in zip(self.model.weights, self.masters, strict=True):
            w.data.copy_(master.data)


def train(accelerator: Any, model: Any, optimizer: Any, change: Change, steps: range) -> None:
    for number in steps:
        change(accelerator.unwrap_model(model), number)
        if not any(p.requires_grad for p in model.parameters()):
            continue
        accelerator.backward(model(number))
        optimizer.step()
        optimizer.zero_grad()


def ours(dtype: torch.dtype, way: dict[str, Any], kind: str, change: Change, tied: bool) -> Any:
    """Parameters, and what the optimizer's state dict has."""
    accelerator = attach(cpu(), init_scale=8.0, find_overflow="off", **way)
    model = Squares(dtype)
    if tied:
        tie(model, 0)
    model, optimizer = accelerator.prepare(model, KINDS[kind](groups_of(model)))
    # The worker updates a part when somebody waits for it, so who does not wait sees the old one.
    with lazy() if "step_mode" in way else one_part_each():
        train(accelerator, model, optimizer, change, range(STEPS))
        optimizer.synchronize()
    state = optimizer.state_dict()["state"]
    found = [w.detach().clone() for w in accelerator.unwrap_model(model).weights], state
    detach(accelerator)
    return found


def assert_as_plain(
    dtype: torch.dtype, way: dict[str, Any], kind: str, change: Change, tied: bool = False
) -> None:
    model = Squares(dtype)
    if tied:
        tie(model, 0)
    plain = Plain(model, kind)
    for number in range(STEPS):
        change(model, number)
        plain.step(number)
    weights, state = ours(dtype, way, kind, change, tied)
    assert same(weights, [w.detach() for w in model.weights])
    order = [*range(1, len(weights)), 0]  # the optimizer's
    for index, entry in plain.optimizer.state_dict()["state"].items():
        mine = dict(state[index])
        master = mine.pop("master", None)
        assert same(mine, entry)
        if dtype is not torch.float32:
            assert torch.equal(master, plain.masters[order[index]].detach())


def tie(model: Squares, number: int) -> None:
    """The old way to tie weights: two parameters, one memory."""
    if number == 0:
        model.weights[3].data = model.weights[0].data


def freeze(model: Squares, number: int) -> None:
    """In turns, as LISA and alternating phases do."""
    for place, w in enumerate(model.weights):
        w.requires_grad_((place + number) % 3 > 0)


def edit(model: Squares, number: int) -> None:
    """Through ``.data``, which counts no version: a clamp, a copy, a zeroed row, a frozen one."""
    if number == 2:
        model.weights[0].data.clamp_(-0.5, 0.5)
        model.weights[2].data[::2].zero_()
    if number == 3:
        model.weights[1].data.copy_(torch.full((5, 6), 0.75))
    if number > 3:
        model.weights[2].data[number].fill_(0.5)


def everything(model: Squares, number: int) -> None:
    freeze(model, number)
    edit(model, number)
    if number == 4:
        model.weights[3].data = model.weights[0].data
    if number == 6:
        model.weights[0].data = model.weights[0].data.clone()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("change", [freeze, tie, edit])
def test_a_master_follows_its_memory(
    change: Change, dtype: torch.dtype, kind: str, way: dict[str, Any]
) -> None:
    assert_as_plain(dtype, way, kind, change)
    if change is tie:
        assert_as_plain(dtype, way, kind, lambda model, number: None, tied=True)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_frozen_tied_edited_and_untied(dtype: torch.dtype, way: dict[str, Any]) -> None:
    """All in one loop, the masters' memory changing under way."""
    assert_as_plain(dtype, way, "sgd", everything)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_views_that_overlap_train_as_with_stock_or_are_refused(dtype: torch.dtype) -> None:
    """A transposed tie: no one master stands for both views."""

    def transpose(model: Squares, number: int) -> None:
        if number == 0:
            model.weights[1].data = model.weights[0].data.t()

    if dtype is torch.float32:
        each = [ours(dtype, way, "sgd", transpose, tied=False) for way in WAYS[:2]]
        assert same(*each)
        return
    for way in WAYS:
        with pytest.raises(UnsupportedError, match=r"weights\.1 and weights\.0 share memory"):
            ours(dtype, way, "sgd", transpose, tied=False)


def test_columns_of_one_matrix_have_no_masters_of_their_own() -> None:
    def columns(model: Squares, number: int) -> None:
        if number == 0:
            matrix = torch.cat([w.data for w in (model.weights[0], model.weights[3])], 1)
            model.weights[0].data, model.weights[3].data = matrix[:, :5], matrix[:, 5:]

    with pytest.raises(UnsupportedError, match=r"weights\.3 and weights\.0 share memory"):
        ours(torch.float16, {"step_mode": "overlap"}, "sgd", columns, tied=False)


def test_delayed_refuses_parameters_in_one_memory() -> None:
    with pytest.raises(UnsupportedError, match="preview of one over"):
        ours(torch.float32, {"step_mode": "delayed"}, "sgd", tie, tied=False)


@pytest.mark.parametrize("others", ["buffer", "frozen"])
def test_a_step_is_awaited_where_others_are_in_its_memory(
    others: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not the optimizer's, so a use of them does not wait."""
    model = Squares(torch.float32)
    accelerator = attach(cpu(), init_scale=8.0, step_mode="overlap")
    if others == "buffer":
        model.register_buffer("seen", model.weights[0].data.view(-1))
    else:
        model.seen = nn.Parameter(model.weights[0].data, requires_grad=False)
    stepped = list(model.weights)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(stepped, lr=0.5))
    with lazy(), caplog.at_level(logging.WARNING, "accel_scaler"):
        accelerator.backward(model(0))
        optimizer.step()
        seen = accelerator.unwrap_model(model).seen.detach().clone().view(-1)
        assert torch.equal(seen, stepped[0].detach().view(-1))
    assert "seen of Squares shares memory" in caplog.text
    detach(accelerator)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("places", [[0], range(5)], ids=["one", "all"])
def test_a_master_that_was_saved_is_loaded_for_a_frozen_parameter(
    places: Sequence[int], way: dict[str, Any]
) -> None:
    """It trains again later: the run that is resumed goes on as the one that was not."""

    def frozen(model: Squares, number: int) -> None:
        for place in places:
            model.weights[place].requires_grad_(number < 3 or number > 5)

    def run(model: Squares, steps: range, saved: Any = None) -> Any:
        accelerator = attach(cpu(), init_scale=8.0, **way)
        if saved is not None:
            frozen(model, steps.start)
        prepared, optimizer = accelerator.prepare(model, KINDS["sgd"](groups_of(model)))
        if saved is not None:
            optimizer.load_state_dict(saved)
        train(accelerator, prepared, optimizer, frozen, steps)
        state = optimizer.state_dict()
        detach(accelerator)
        return state

    model, again = Squares(torch.float16), Squares(torch.float16)
    run(model, range(STEPS))
    saved = run(again, range(4))
    run(again, range(4, STEPS), saved)
    assert same(again.state_dict(), model.state_dict())


def test_an_edit_through_data_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        ours(torch.float16, {}, "sgd", edit, tied=False)
    (line,) = [r.getMessage() for r in caplog.records if ".data" in r.getMessage()]
    assert line.startswith("weights.2, weights.0 changed")


def test_no_edit_is_found_where_there_was_none(caplog: pytest.LogCaptureFixture) -> None:
    """NaN and a negative zero among the weights, in a dtype that rounds."""

    def odd(model: Squares, number: int) -> None:
        if number == 0:
            with torch.no_grad():
                model.weights[4].copy_(torch.tensor([-0.0, 1e-8, 3.0]))

    with caplog.at_level(logging.WARNING, "accel_scaler"):
        ours(torch.float16, {}, "adamw", odd, tied=False)
    assert not [r for r in caplog.records if ".data" in r.getMessage()]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_two_optimizers_that_step_one_memory(mode: str) -> None:
    """As torch does it one after the other; the next forward sees both updates, whole."""

    def run(mode: str) -> list[Tensor]:
        model = Squares(torch.float32)
        tie(model, 0)
        accelerator = attach(cpu(), init_scale=8.0, step_mode=mode)
        halves = model.weights[:2], model.weights[2:]
        made = [torch.optim.SGD(half, lr=0.5, momentum=0.5) for half in halves]
        model, *optimizers = accelerator.prepare(model, *made)
        seen = []
        with lazy() if mode == "overlap" else one_part_each():
            for number in range(4):
                accelerator.backward(model(number))
                for optimizer in optimizers:
                    optimizer.step()
                    seen += [w.detach().clone() for w in accelerator.unwrap_model(model).weights]
                    optimizer.zero_grad()
        detach(accelerator)
        return seen

    assert same(run(mode), run("sync"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_two_optimizers_with_masters_in_one_memory_are_refused(dtype: torch.dtype) -> None:
    model = Squares(dtype)
    tie(model, 0)
    made = [torch.optim.SGD(half, lr=0.5) for half in (model.weights[:2], model.weights[2:])]
    accelerator = attach(cpu(), offload="cpu")
    with pytest.raises(UnsupportedError, match=r"1 parameters with a SGD .* \(in one memory\)"):
        accelerator.prepare(model, *made)
    detach(accelerator)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_gradient_that_is_dropped_after_a_clip_is_left_out(way: dict[str, Any]) -> None:
    """DINO's last layer in its first epoch; the coefficient is that of all gradients."""
    model = Squares(torch.float16)
    plain = Squares(torch.float16)
    masters = [nn.Parameter(w.detach().float()) for w in plain.weights]
    reference = torch.optim.SGD(masters, lr=0.5)
    accelerator = attach(cpu(), init_scale=8.0, **way)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.weights, lr=0.5))
    for number in range(4):
        accelerator.backward(model(number))
        accelerator.clip_grad_norm_(model.parameters(), 0.25)
        accelerator.unwrap_model(model).weights[2].grad = None
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        (plain(number) * 8.0).backward()
        for w, master in zip(plain.weights, masters, strict=True):
            assert w.grad is not None
            master.grad = w.grad.float() / 8.0
        nn.utils.clip_grad_norm_(masters, 0.25)
        masters[2].grad = None
        reference.step()
        for w, master in zip(plain.weights, masters, strict=True):
            w.data.copy_(master.data)
    optimizer.synchronize()
    ours_, theirs = accelerator.unwrap_model(model).weights, plain.weights
    # Unscaled and clipped by one product, as docs/what-to-expect.md says.
    for one, other in zip(ours_, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-3)
    assert torch.equal(ours_[2], Squares(torch.float16).weights[2])
    detach(accelerator)


def test_optimizer_state_waits_for_the_step_in_hand() -> None:
    """What is read or written there between two steps is of the step before, as in sync."""

    def run(mode: str) -> list[Tensor]:
        model = Squares(torch.float32)
        accelerator = attach(cpu(), init_scale=8.0, step_mode=mode)
        model, optimizer = accelerator.prepare(model, KINDS["adamw"](groups_of(model)))
        with lazy() if mode == "overlap" else one_part_each():
            for number in range(4):
                accelerator.backward(model(number))
                optimizer.step()
                optimizer.zero_grad()
                for w in accelerator.unwrap_model(model).weights:
                    optimizer.state[w]["exp_avg"].mul_(0.5)
            optimizer.synchronize()
        found = [w.detach().clone() for w in accelerator.unwrap_model(model).weights]
        detach(accelerator)
        return found

    assert same(run("overlap"), run("sync"))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_parameter_comes_back_to_its_group_with_its_master(
    dtype: torch.dtype, way: dict[str, Any]
) -> None:
    """As LISA does it by groups; one is written to meanwhile."""
    model, again = Squares(dtype), Squares(dtype)
    plain = Plain(again, "sgd")
    accelerator = attach(cpu(), init_scale=8.0, **way)
    model, optimizer = accelerator.prepare(model, KINDS["sgd"](groups_of(model)))
    weights = accelerator.unwrap_model(model).weights
    with lazy() if "step_mode" in way else one_part_each():
        for number in range(STEPS):
            chosen = [w for w in range(1, 5) if (w + number) % 3]
            optimizer.param_groups[0]["params"] = [weights[w] for w in chosen]
            plain.optimizer.param_groups[0]["params"] = [plain.masters[w] for w in chosen]
            if number == 4:
                for each in (weights, again.weights):
                    each[2].data[::2].zero_()
            accelerator.backward(model(number))
            optimizer.step()
            model.zero_grad()
            plain.step(number)
        optimizer.param_groups[0]["params"] = list(weights[1:])
        saved = optimizer.state_dict()["state"]
    assert same([w.detach() for w in weights], [w.detach() for w in again.weights])
    if dtype is torch.float16:
        masters = [saved[i]["master"] for i in range(4)]
        assert same(masters, [master.detach() for master in plain.masters[1:]])
    detach(accelerator)
