"""How much of float16's range scaled gradients take, whatever was done to them since."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp
from telemetry_runs import attached, loss_of, sgd, windows_of
from torch import Tensor, nn

from accel_scaler.scaling import Window
from accel_scaler.telemetry import gradient_range
from accel_scaler.telemetry.gradient_range import measure, read_measured

INF = math.inf


# Beside a plain look at what the backward left.


class Look:
    """What a plain loop sees of scaled gradients: ``.grad`` right after the backward."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        grads = {name: p.grad.float() for name, p in named if p.grad is not None}
        self.largest = max(float(g.abs().max()) for g in grads.values())
        zeros = {name: int((g == 0).sum()) for name, g in grads.items()}
        small = {name: int((g.abs() < 2.0**-14).sum()) for name, g in grads.items()}
        self.shares = {
            name: [
                round(zeros[name] / g.numel(), 6),
                round((small[name] - zeros[name]) / g.numel(), 6),
            ]
            for name, g in grads.items()
        }
        self.zero_share = round(sum(zeros.values()) / sum(g.numel() for g in grads.values()), 6)

    def assert_tells(self, line: dict[str, Any], has_largest: bool = True) -> None:
        """Clipping leaves a rounding of float32."""
        assert line["underflow"] == self.shares
        assert line["zero_share"] == self.zero_share
        assert ("largest_gradient" in line) == has_largest
        assert not has_largest or math.isclose(line["largest_gradient"], self.largest, rel_tol=1e-6)


def spoiled(plain: nn.Module) -> nn.Module:
    """Some elements of each gradient become zero and some tiny, as those below float16 do."""

    def spoil(grad: Tensor) -> Tensor:
        values = grad.clone().view(-1)
        values[::3] = 0.0
        values[1::5] = 2.0**-20  # scaled: hooks see what the backward left
        return values.view_as(grad)

    for p in plain.parameters():
        p.register_hook(spoil)
    return plain


def everything(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params, max_norm)


def by_halves(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params[:2], max_norm)
    accelerator.clip_grad_norm_(params[2:], 2 * max_norm)


def twice(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params, max_norm)
    accelerator.clip_grad_norm_(params, max_norm / 3)


def unscaled_first(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.unscale_gradients()
    accelerator.clip_grad_norm_(params, max_norm)


def unscaled(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.unscale_gradients()


def nothing(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    pass


Clip = Callable[[Any, Sequence[Tensor], float], None]
CLIPS = [everything, by_halves, twice, unscaled_first, unscaled, nothing]
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "folded": {"fold_unscale": True},
    "overlap": {"step_mode": "overlap"},
    "delayed on the host": {"step_mode": "delayed", "offload": "cpu"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("clip", CLIPS)
def test_it_is_what_the_backward_left(
    clip: Clip, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if dtype is torch.float16 and clip in (unscaled, unscaled_first):
        pytest.skip("refused: they are unscaled within the step")
    # float16 gradients of which some only are clipped are multiplied in float16.
    clip_rounds = dtype is torch.float16 and clip is by_halves
    path, plain = tmp_path / "run.jsonl", spoiled(mlp().to(dtype))
    fused = {"fused": True} if "fold_unscale" in settings and dtype is torch.float32 else {}
    looks = []
    with attached(path, underflow_interval=2, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), **fused))
        for number in range(5):
            accelerator.backward(loss_of(model, number))
            looks.append(Look(list(plain.named_parameters())))
            max_norm = 0.01 if number else 1e6
            clip(accelerator, list(model.parameters()), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        last = accelerator.scaler_history
        assert last.headroom is not None
    found = windows_of(path)
    assert [line["step"] for line in found if "zero_share" in line] == [0, 2, 4]
    for number in (0, 2, 4):
        if clip_rounds and number:
            largest = found[number]["largest_gradient"]
            assert math.isclose(largest, looks[number].largest, rel_tol=1e-3)
        else:
            looks[number].assert_tells(found[number])


def by_value(accelerator: Any, params: Sequence[Tensor]) -> None:
    accelerator.clip_grad_value_(params, 1e-3)


def part_first(accelerator: Any, params: Sequence[Tensor]) -> None:
    for which in (params[:2], params):
        accelerator.clip_grad_norm_(which, 0.01)


def part_last(accelerator: Any, params: Sequence[Tensor]) -> None:
    for which in (params, params[:2]):
        accelerator.clip_grad_norm_(which, 0.01)


@pytest.mark.parametrize("clip", [by_value, part_first, part_last])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_of_clipped_elements_the_largest_is_not_known_of_overlapping_clips_it_is(
    settings: dict[str, Any], clip: Callable[..., None], tmp_path: Path
) -> None:
    path, plain = tmp_path / "run.jsonl", spoiled(mlp())
    with attached(path, underflow_interval=1, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        accelerator.backward(loss_of(model, 0))
        look = Look(list(plain.named_parameters()))
        clip(accelerator, list(model.parameters()))
        optimizer.step()
    (line,) = windows_of(path)
    look.assert_tells(line, has_largest=clip is not by_value)


def test_a_window_that_overflowed_is_not_measured_the_next_one_is(tmp_path: Path) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, underflow_interval=4) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        for number in range(10):
            accelerator.backward(loss_of(model, number) * (INF if number in (0, 1, 4) else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    measured = [line["step"] for line in windows_of(path) if "largest_gradient" in line]
    assert measured == [2, 5, 8]


def test_two_optimizers_are_one_window_and_the_largest_is_that_of_both(tmp_path: Path) -> None:
    path, body, head = tmp_path / "run.jsonl", nn.Linear(8, 4), nn.Linear(4, 1)
    with attached(path, underflow_interval=2) as accelerator:
        models = accelerator.prepare(body, head)
        pairs = [accelerator.prepare(sgd(m.parameters())) for m in models]
        looks = []
        for _ in range(3):
            accelerator.backward(models[1](models[0](torch.ones(2, 8))).sum())
            named = [(f"{m}.{n}", p) for m in (0, 1) for n, p in models[m].named_parameters()]
            looks.append(Look(named))
            for optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
    found = windows_of(path)
    for number in (0, 2):
        assert found[number]["largest_gradient"] == looks[number].largest
        assert found[number]["zero_share"] == looks[number].zero_share
        assert len(found[number]["underflow"]) == 4
    assert "zero_share" not in found[1]


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_where_nothing_is_scaled_float32_gradients_say_nothing(
    precision: str, tmp_path: Path
) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, precision, underflow_interval=1) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        accelerator.backward(loss_of(model, 0))
        optimizer.step()
        assert accelerator.scaler_history.headroom is None
        assert "scaler/headroom" not in accelerator.scaler_history.metrics()
    (line,) = windows_of(path)
    assert "largest_gradient" not in line
    assert "zero_share" not in line


def test_headroom_is_that_of_the_present_scale(tmp_path: Path) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, underflow_interval=100) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        seen = []
        for factor in (1.0, INF, INF):
            accelerator.backward(loss_of(model, 0) * factor)
            largest = max(float(p.grad.abs().max()) for p in plain.parameters())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            seen.append((largest, accelerator.scaler_history.metrics().get("scaler/headroom")))
    first = math.log2(65504 / seen[0][0])
    assert seen[0][1] is None  # nothing is read at once
    assert seen[1][1] is not None
    assert seen[2][1] is not None
    assert math.isclose(seen[1][1], first + 1, abs_tol=1e-5)
    assert math.isclose(seen[2][1], first + 2, abs_tol=1e-5)


# The count itself.


def totals(grads: Sequence[Tensor | None], scale: float | None = 1.0) -> dict[str, Any]:
    params = []
    for grad in grads:
        p = nn.Parameter(torch.zeros(() if grad is None else grad.shape))
        if grad is not None:
            p = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device))
            p.grad = grad
        params.append(p)
    window = Window()
    optimizer = torch.optim.SGD(params, lr=0.1)
    record = window.record(optimizer)
    return read_measured(measure(params, range(len(params)), window, record, scale))


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_pieces_count_alike(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_range, "PIECE", piece)
    torch.manual_seed(0)
    grads = [torch.randn(n) for n in (1, 100, 3, 5, 64, 7, 7, 129, 1)]
    for grad in grads:
        grad[torch.rand(len(grad)) < 0.3] = 0.0
        grad[torch.rand(len(grad)) < 0.2] = -(2.0**-15)
    grads[5] = grads[5].half()
    found = totals(grads, 1.0)
    expected = [
        (
            i,
            round(float((g == 0).sum()) / len(g), 6),
            round(float(((g != 0) & (g.abs() < 2**-14)).sum()) / len(g), 6),
        )
        for i, g in enumerate(grads)
    ]
    assert list(found["underflow"]) == expected
    assert found["largest_gradient"] == max(float(g.abs().max()) for g in grads)
    zeros = sum(int((g == 0).sum()) for g in grads)
    assert found["zero_share"] == round(zeros / sum(map(len, grads)), 6)


def test_other_gradients_are_not_measured() -> None:
    others = [None, torch.zeros(0), torch.ones(2, dtype=torch.bfloat16)]
    others += [torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta")]
    others += [torch.tensor([[0.0], [-8.0]]).to_sparse(1)]
    assert totals(others) == {"underflow": (), "largest_gradient": None, "zero_share": None}
    assert totals([*others, torch.full((2,), 3.0)])["largest_gradient"] == 3.0


def test_strides_do_not_matter() -> None:
    wide = torch.arange(12.0).reshape(3, 4).t()
    found = totals([wide, torch.zeros(1, 1, 1).expand(2, 3, 4)])
    assert (found["largest_gradient"], found["zero_share"]) == (11.0, round(25 / 36, 6))
