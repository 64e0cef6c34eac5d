"""``on_overflow="retry"``: a run equals, bit for bit, the one whose scale was low enough."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from async_support import assert_same
from telemetry_runs import attached, sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiplicativeLR
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])


class Block(nn.Module):
    """Dropout, running statistics, and a buffer that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.inner(x)).float()) - 0.1 * self.mean
        x += self.inner.bias  # read by an operation that writes to something else
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return x


class Net(nn.Module):
    """Its loss is the model's own, or is made of its output."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.last = Block(), Block(), nn.Linear(8, 1)
        if half:
            self.half()
            self.first.norm.float()
            self.second.norm.float()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = self.first(x.to(self.last.weight.dtype)).to(self.last.weight.dtype)
        x = checkpoint(self.second, x, use_reentrant=False).to(self.last.weight.dtype)
        out = self.last(x).float()
        return out if y is None else {"loss": (out - y).square().mean() * 8, "out": out}


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


def by_model(accelerator: Any, model: Any, number: int) -> list[float]:
    x, y = rows(number)
    loss = model(x, y)["loss"]
    accelerator.backward(loss)
    return [loss.item()]


def by_script(accelerator: Any, model: Any, number: int) -> list[float]:
    (x, y), (z, _) = rows(number), rows(number + 100)
    first, second = model(x), model(z)
    loss = ((first - y) * 4).square().mean() + (first * second).mean()
    accelerator.backward(loss)
    return [loss.item()]


def twice(accelerator: Any, model: Any, number: int) -> list[float]:
    """Two losses a window."""
    return by_model(accelerator, model, number) + by_script(accelerator, model, number + 50)


Backwards = Callable[[Any, Any, int], list[float]]


def train(
    scale: float,
    backwards: Backwards = by_model,
    windows: int = 4,
    accumulation: int = 1,
    half: bool = False,
    clip: float | None = 0.5,
    to_none: bool = True,
    make: Any = None,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """All there is afterwards, and the records."""
    torch.manual_seed(5)
    net = Net(half) if make is None else make()
    given: dict[str, Any] = {"init_scale": scale, "growth_interval": 1000} | settings
    with attached(None, accumulation=accumulation, **given) as accelerator:
        model, optimizer = accelerator.prepare(net, sgd(net.parameters(), momentum=0.9))
        schedule = accelerator.prepare(MultiplicativeLR(optimizer, lambda _: 0.9))
        losses, norms = [], []
        for number in range(windows * accumulation):
            with accelerator.accumulate(model):
                losses += backwards(accelerator, model, number)
                if accelerator.sync_gradients and clip is not None:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), clip)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=to_none)
                assert not optimizer.step_was_skipped
        records = list(accelerator.scaler_history.records)
        return {
            "weights": copy.deepcopy(net.state_dict()),
            "state": copy.deepcopy(optimizer.state_dict()["state"]),
            "losses": losses,
            "norms": norms,
            "lr": schedule.get_last_lr(),
            "random": torch.get_rng_state(),
        }, records


def assert_no_window_is_lost(scales: Sequence[float] = (2.0**16, 2.0**24), **given: Any) -> None:
    """Beside the run with the lowest scale that it has come to, so that no number is subnormal."""
    for scale in scales:
        high, records = train(scale, on_overflow="retry", **given)
        assert not any(r.skipped or r.overflowed for r in records)
        assert records[-1].scale < scale
        low, records = train(records[-1].scale, **given)
        assert not any(r.skipped for r in records)
        assert_same(high, low)


@pytest.mark.parametrize(
    ("mode", "accumulation", "backwards"),
    [
        ("sync", 1, by_model),
        ("overlap", 3, by_script),
        ("sync", 3, twice),
        ("overlap", 1, twice),
    ],
)
def test_a_run_equals_the_one_whose_scale_was_low_enough(
    mode: str, accumulation: int, backwards: Backwards
) -> None:
    assert_no_window_is_lost(backwards=backwards, accumulation=accumulation, step_mode=mode)


@EACH_MODE
def test_float16_weights(mode: str) -> None:
    assert_no_window_is_lost(half=True, accumulation=2, step_mode=mode)


class EncoderDecoder(Net):
    """Returns in float32 what the rest of it has used, too, as T5 and BART do."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        encoded = self.second(self.first(x)).float()
        return {"loss": (self.last(encoded).float() - y).square().mean() * 8, "encoded": encoded}


def test_a_model_that_returns_what_it_has_used_itself() -> None:
    assert_no_window_is_lost(make=EncoderDecoder, accumulation=2)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.layers(z)
        return out


class Critic(Generator):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(8, 1))


@pytest.mark.parametrize("zeroed", ["once", "twice"])
@EACH_MODE
def test_of_a_gan_the_critics_step_is_made_again_and_the_generators_is_a_skip(
    mode: str, zeroed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic's forward takes what comes with the generator's graph."""
    torch.manual_seed(3)
    nets = Generator(), Critic()
    given: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 1000, "step_mode": mode}
    with attached(None, on_overflow="retry", **given) as accelerator:
        optimizers = [sgd(net.parameters(), lr=1e-3) for net in nets]
        (g, d), (opt_g, opt_d) = accelerator.prepare(*nets), accelerator.prepare(*optimizers)
        for number in range(2):
            real, z = rows(number)[0], rows(number + 50)[0]
            fake = g(z)
            opt_d.zero_grad()
            accelerator.backward(((d(real) - 1).square() + d(fake.detach()).square()).mean())
            opt_d.step()
            if zeroed == "twice":
                opt_d.zero_grad()
            opt_g.zero_grad()
            accelerator.backward(3e5 * (1 - number) * (d(fake) - 1).square().mean())
            accelerator.clip_grad_norm_(nets[0].parameters(), 1.0)
            opt_g.step()
        records = list(accelerator.scaler_history.records)
    assert [r.skipped for r in records] == [False, True, False, False]
    assert records[0].retries
    assert caplog.text.count("made again: an input of a forward came with a graph") == 1


class Sized(nn.Module):
    """``loss = sum(w * size)``: the gradient of ``w`` is ``size``, through a float16 activation."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, size: float) -> Tensor:
        return (self.w.half() * size).sum().float()


@pytest.mark.parametrize(
    ("settings", "scales", "retries"),
    [
        # 6 * 2**13 is below 65504, 6 * 2**14 is not.
        ({}, [13] * 8, [3, 0, 1, 0, 1, 0, 1, 0]),
        ({"on_overflow": "skip"}, [16, 15, 14, 13, 13, 14, 13, 13], [0] * 8),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_the_scale_grows_as_torchs(
    settings: dict[str, Any], scales: list[int], retries: list[int], count: int
) -> None:
    """With ``skip`` there is a skip, at 14, every other interval, where ``retry`` runs again.
    ``count``: of optimizers in each window, one of which overflows."""
    given = {"on_overflow": "retry", "growth_interval": 2, "init_scale": 2.0**16} | settings
    with attached(None, **given) as accelerator:
        models = [accelerator.prepare(Sized()) for _ in range(count)]
        made = [sgd(model.parameters(), lr=2.0**-8, momentum=0.0) for model in models]
        optimizers = [accelerator.prepare(optimizer) for optimizer in made]
        for _ in range(8):
            accelerator.backward(sum(model(6.0 / n) for n, model in enumerate(models, 1)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        records = list(accelerator.scaler_history.records)
        verdict = accelerator.scaler_history.summary().splitlines()[0]
    assert [r.scale for r in records] == [2.0**n for n in scales]
    assert [r.retries for r in records] == retries
    assert records[0].first_scale == (2.0**16 if retries[0] else None)
    again = sum(map(bool, retries))
    assert (f"{again} step" in verdict and "batches lost: 0" in verdict) == bool(again)


def looked_at(accelerator: Any, model: Any, number: int) -> list[float]:
    """The script takes gradients of its own, and halves what comes to an output."""
    x, y = rows(number)
    ahead = x.clone().requires_grad_()
    (direction,) = torch.autograd.grad((model(ahead) - y).square().mean(), ahead)
    out = model(x + direction.sign())
    out.register_hook(lambda grad: grad / 2)
    loss = (out - y).square().mean() * 16
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    accelerator.backward(loss)
    return [loss.item()]


def test_what_scripts_do_beside_a_forward() -> None:
    assert_no_window_is_lost(backwards=looked_at, accumulation=2)


class Loose(Net):
    """It has a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.prompt = nn.Linear(1, 1), nn.Parameter(torch.ones(4, 8))


def loosely(use: str) -> Backwards:
    def backwards(accelerator: Any, model: Any, number: int) -> list[float]:
        x, y = rows(number)
        kept: list[Tensor] = []
        handle = model.first.register_forward_hook(lambda _, args, out: kept.append(out))
        out = model(model.prompt if use == "prompt" else x)
        handle.remove()
        if use == "checkpoint":
            out = checkpoint(model.spare, out, use_reentrant=True)
        loss = (out - y).square().mean() * 8
        if use == "penalty":
            loss = loss + 0.01 * model.last.weight.square().sum()
        if use == "features":
            loss = loss + kept[0].square().mean()
        if use == "gradient penalty":
            (slope,) = torch.autograd.grad(loss, model.last.weight, create_graph=True)
            loss = loss + slope.square().mean()
        if use == "by hand":
            accelerator.scaler.scale(loss).backward()
        else:
            accelerator.backward(loss)
        if use == "evaluation":
            model.eval()
        if use == "freezing":
            model.first.requires_grad_(False)
        return [loss.item()]

    return backwards


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("penalty", "outside of a forward"),
        ("features", "outside of a forward"),
        ("gradient penalty", "or in a gradient penalty"),
        ("by hand", "made again: no forward of a prepared model, with accelerator.backward()"),
        ("checkpoint", "that no recorded forward gives"),
        ("prompt", "made again: an input of a forward came with a graph, or was a parameter"),
        ("evaluation", "another output"),
        ("freezing", "its parameters were changed"),
    ],
)
def test_gradients_that_would_be_others_are_not_made(
    use: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They came from elsewhere too, or the forward is another one by now: the window is skipped."""
    model = Loose()
    before = copy.deepcopy(model.state_dict())
    with attached(None, on_overflow="retry", init_scale=2.0**16) as accelerator:
        model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
        loosely(use)(accelerator, model, 0)
        optimizer.step()
        assert optimizer.step_was_skipped
    assert caplog.text.count("cannot be made again") == caplog.text.count(reason) == 1
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)


# --- what cannot be made again ------------------------------------------------------------------


class Plain(nn.Module):
    """The gradient comes through a float16 activation. ``most``: so many forwards has a window."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.calls, self.most = nn.Parameter(torch.ones(4)), 0, 1

    def forward(self, x: Tensor, loss: bool = True) -> Tensor:
        out = (self.w.half() * x).float()
        return out.sum() if loss else out


class Counting(Plain):
    def forward(self, x: Tensor, loss: bool = True) -> Tensor:
        self.calls += 1
        return super().forward(x, loss) * (1 + self.calls / 64)


class Average(Plain):
    """Writes to a parameter before a window's first backward, by one way or the other."""

    how = "in place"

    def forward(self, x: Tensor, loss: bool = True) -> Tensor:
        with torch.no_grad():
            if self.calls % self.most:
                pass
            elif self.how == "in place":
                self.w.mul_(0.5)
            else:
                self.w.data = self.w.data * 0.5
        self.calls += 1
        return super().forward(x, loss)


class Swapped(Average):
    how = "data"


class Once(Plain):
    def forward(self, x: Tensor, loss: bool = True) -> Tensor:
        self.calls += 1
        if self.calls > self.most:
            raise RuntimeError("only once")
        return super().forward(x, loss)


def edited(accelerator: Any, model: Any, x: Tensor) -> None:
    model.w.grad.mul_(0.5)


def replaced(accelerator: Any, model: Any, x: Tensor) -> None:
    model.w.grad = model.w.grad * 0.5


def by_hand(accelerator: Any, model: Any, x: Tensor) -> None:
    for optimizer in accelerator._optimizers:
        if optimizer.param_groups[0]["params"][0] is model.w:
            accelerator.scaler.unscale_(optimizer)


def parameters_changed(accelerator: Any, model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.w.mul_(1.0)


def nothing(accelerator: Any, model: Any, x: Tensor) -> None:
    pass


CLIPS: dict[str, Callable[[Any, Any], Any]] = {
    "no clip": lambda accelerator, parameters: None,
    "norm": lambda accelerator, parameters: accelerator.clip_grad_norm_(parameters, 2.0**-6),
    "value": lambda accelerator, parameters: accelerator.clip_grad_value_(parameters, 2.0**-6),
    "unscale": lambda accelerator, parameters: accelerator.unscale_gradients(),
}


@pytest.mark.parametrize(
    ("kind", "between", "why", "mode", "clip", "big", "accumulation"),
    [
        (Counting, nothing, "another output", "sync", "no clip", (True, True), 4),
        (Average, nothing, "writes to its parameters", "sync", "norm", (True,), 1),
        (Swapped, nothing, "writes to its parameters", "overlap", "norm", (True, True), 1),
        (Once, nothing, "RuntimeError: only once", "sync", "unscale", (True,), 4),
        (Plain, edited, "changed after the backward", "sync", "value", (True,), 4),
        (Plain, replaced, "changed after the backward", "overlap", "norm", (True, True), 1),
        (Plain, by_hand, "GradScaler.unscale_", "sync", "no clip", (False, True), 4),
        (Plain, parameters_changed, "parameters were changed", "sync", "norm", (True, False), 1),
    ],
)
def test_a_window_that_cannot_be_made_again_is_an_ordinary_skip_told_once(
    kind: type[Plain],
    between: Any,
    why: str,
    mode: str,
    clip: str,
    big: tuple[bool, ...],
    accumulation: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All is as in a run without ``retry``, bit for bit. ``big``: of each optimizer, whether it
    overflows in two of four windows."""

    def run(on_overflow: str) -> dict[str, Any]:
        given = {"on_overflow": on_overflow, "init_scale": 2.0**15, "find_overflow": "off"}
        with attached(None, accumulation=accumulation, step_mode=mode, **given) as accelerator:
            nets = [kind() if overflows else Plain() for overflows in big]
            for net in nets:
                net.most = accumulation
            models = [accelerator.prepare(net) for net in nets]
            optimizers = [accelerator.prepare(sgd(n.parameters(), lr=2.0**-8)) for n in nets]
            schedules = [
                accelerator.prepare(MultiplicativeLR(optimizer, lambda _: 0.5))
                for optimizer in optimizers
            ]
            seen: list[Any] = []
            for number in range(4 * accumulation):
                overflows = number // accumulation in (1, 2)
                xs = [torch.full((4,), 64.0 if overflows and each else 2.0**-5) for each in big]
                with accelerator.accumulate(*models):
                    losses = [model(x) for model, x in zip(models, xs, strict=True)]
                    accelerator.backward(sum(losses))
                    if accelerator.sync_gradients:
                        for net, x in zip(nets, xs, strict=True):
                            if x[0] > 1:
                                between(accelerator, net, x)
                        for net in nets:
                            seen.append(CLIPS[clip](accelerator, net.parameters()))
                    for optimizer, schedule in zip(optimizers, schedules, strict=True):
                        optimizer.step()
                        schedule.step()
                        seen += [optimizer.step_was_skipped, schedule.get_last_lr()]
                        optimizer.zero_grad()
                if accelerator.sync_gradients:
                    for net in nets:
                        net.calls = 0
            records = list(accelerator.scaler_history.records)
            return {
                "seen": seen,
                "weights": [copy.deepcopy(net.state_dict()) for net in nets],
                "state": [copy.deepcopy(each.state_dict()["state"]) for each in optimizers],
                "records": [(r.skipped, r.scale, r.next_scale, r.lr, r.grad_norm) for r in records],
            }

    plain = run("skip")
    assert [record[0] for record in plain["records"]] == [False, True, True, False]
    assert "cannot be made again" not in caplog.text
    assert_same(run("retry"), plain)
    assert caplog.text.count("cannot be made again") == 1
    has_joined = "another optimizer has updated" in caplog.text  # what is unscaled by hand steps
    assert why in caplog.text or (has_joined and between is by_hand)


def after_one_backward(accelerator: Any, nets: Sequence[nn.Module], values: Any) -> list[Any]:
    """An optimizer for each net, after a backward of them all; each net has its value as input."""
    models = accelerator.prepare(*nets)
    optimizers = accelerator.prepare(*(sgd(net.parameters()) for net in nets))
    losses = [model(torch.full((4,), x)) for model, x in zip(models, values, strict=True)]
    accelerator.backward(sum(losses))
    return list(optimizers)


def test_a_second_run_that_fails_skips_every_optimizer_of_it() -> None:
    nets = Once(), Plain()
    with attached(None, on_overflow="retry", init_scale=2.0**15) as accelerator:
        for optimizer in after_one_backward(accelerator, nets, (64.0, 0.5)):
            optimizer.step()
            assert optimizer.step_was_skipped
        assert accelerator.scaler.get_scale() == 2.0**14
    assert all(net.w.tolist() == [1.0] * 4 for net in nets)


def test_an_earlier_clip_is_not_lost_where_gradients_are_made_again() -> None:
    """float16 gradients stay scaled, and a clip of theirs is left to the step."""

    def run(scale: float, **settings: Any) -> tuple[Any, list[Any]]:
        with attached(None, init_scale=scale, **settings) as accelerator:
            nets = Plain().half(), Plain().half()
            models = accelerator.prepare(*nets)
            optimizers = [accelerator.prepare(sgd(net.parameters())) for net in nets]
            for size in (64.0, 1.0):
                loss = models[0](torch.full((4,), size)) + models[1](torch.full((4,), 0.5))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(nets[1].w, 0.25)
                accelerator.clip_grad_norm_([net.w for net in nets], 256.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            records = list(accelerator.scaler_history.records)
            return [copy.deepcopy(each.state_dict()["state"]) for each in optimizers], records

    ours, records = run(2.0**14, on_overflow="retry")
    theirs, plain = run(2.0**14)
    assert [r.skipped for r in records] == [r.skipped for r in plain] == [True, False]
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("x", "given", "expected", "retries"),
    [
        (float("inf"), {"init_scale": 2.0**16}, (2.0**16, 2.0**15), 0),
        # Beyond float16 at a scale of 1, too.
        (2.0**20, {"init_scale": 2.0**4}, (1.0, 2.0**3), 4),
        (2.0**20, {"init_scale": 2.0**4, "min_scale": 4.0}, (4.0, 2.0**3), 2),
        (2.0**20, {"init_scale": 2.0**20}, (2.0**4, 2.0**19), 16),
    ],
)
def test_what_no_scale_cures_is_an_ordinary_skip_and_explained(
    x: float,
    given: dict[str, float],
    expected: tuple[float, float],
    retries: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once halved; and not taken for a sick scale by the next window."""
    with attached(None, on_overflow="retry", **given) as accelerator:
        net = Plain()
        model = accelerator.prepare(net)
        optimizer = accelerator.prepare(sgd(net.parameters(), lr=2.0**-8))
        loss = model(torch.full((4,), 2.0**-4)) * x
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        assert optimizer.step_was_skipped
        optimizer.zero_grad()
        (record,) = accelerator.scaler_history.records
        assert (record.scale, record.next_scale) == expected
        assert (record.retries, record.skipped) == (retries, True)
        assert "cannot be made again" not in caplog.text


@pytest.mark.parametrize(("second", "clip"), [(False, None), (False, 1.0), (True, 1.0)])
def test_two_optimizers_in_one_window(second: bool, clip: float | None) -> None:
    """Only one of them overflows, and none has stepped: both step at the lower scale."""

    def run(scale: float, **settings: Any) -> tuple[Any, list[Any]]:
        with attached(None, init_scale=scale, **settings) as accelerator:
            nets = Plain(), Plain()
            models = accelerator.prepare(*nets)
            optimizers = accelerator.prepare(*(sgd(n.parameters(), lr=2.0**-8) for n in nets))
            for _ in range(3):
                sizes = (1.0, 2.0**4) if second else (2.0**4, 1.0)
                parts = [m(torch.full((4,), s)) for m, s in zip(models, sizes, strict=True)]
                accelerator.backward(parts[0] + parts[1])
                for net in nets:
                    if clip is not None:
                        accelerator.clip_grad_norm_(net.parameters(), clip)
                for optimizer in optimizers:
                    optimizer.step()
                    assert not optimizer.step_was_skipped
                    optimizer.zero_grad()
            records = list(accelerator.scaler_history.records)
            return [net.w.detach().clone() for net in nets], records

    high, records = run(2.0**16, on_overflow="retry")
    low, plain = run(records[-1].scale)
    assert not any(r.skipped for r in (*records, *plain))
    assert records[-1].scale == 2.0**11
    assert_same(high, low)


def test_an_overflow_that_is_met_after_another_optimizer_has_stepped_is_a_skip() -> None:
    nets = Plain(), Plain()
    with attached(None, on_overflow="retry", init_scale=2.0**15) as accelerator:
        optimizers = after_one_backward(accelerator, nets, (0.5, 64.0))
        for optimizer in optimizers:
            optimizer.step()
        assert [each.step_was_skipped for each in optimizers] == [False, True]
        assert accelerator.scaler.get_scale() == 2.0**14
