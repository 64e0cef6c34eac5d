"""``tracker_interval``: every tracker is told, at its window, once, on the main process alone."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
)
from support import mlp, reset
from telemetry_runs import INF, attached, loss_of, sgd
from tracker_fakes import KeepingTracker, WandbRun, Writer

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.integrations.attachment import attachment_of

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = 7


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(
    accelerator: Any, *trackers: Any, overflows: tuple[int, ...] = (), max_norm: float | None = 0.5
) -> Iterator[int]:
    """``WINDOWS`` windows; yields after each."""
    accelerator.trackers += trackers
    plain = mlp()
    model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
    for window in range(WINDOWS):
        factor = INF if window in overflows else 1.0
        accelerator.backward(loss_of(model, window) * factor)
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield window


def test_a_users_own_tracker_gets_what_a_run_needs() -> None:
    tracker = KeepingTracker()
    with attached(tracker_interval=3) as accelerator:
        seen = []
        for _ in run(accelerator, tracker, overflows=(3,)):
            history = accelerator.scaler_history
            record = history.records[-1]
            seen.append((record, history.skips))
        assert [step for _, step in tracker.told] == [0, 3]  # 6 is told when it is over
    assert [step for _, step in tracker.told] == [0, 3, 6]
    for values, step in tracker.told:
        record, skips = seen[step or 0]
        assert values["scaler/scale"] == record.next_scale
        assert values["scaler/skips"] == skips
        assert all(math.isfinite(value) for value in values.values())
        with_gradients = {"scaler/loss", "scaler/grad_norm", "scaler/clip_coefficient"}
        if record.skipped:
            assert with_gradients.isdisjoint(values)
            continue
        plain = mlp()
        if step == 0:
            loss = loss_of(plain, 0)
            loss.backward()
            grads = [p.grad for p in plain.parameters() if p.grad is not None]
            norm, largest = nn_norm(grads), max(float(g.abs().max()) for g in grads)
            assert values["scaler/loss"] == pytest.approx(loss.item(), rel=1e-3)
            assert values["scaler/grad_norm"] == pytest.approx(norm, rel=1e-2)
            room = math.log2(65504 / (largest * record.scale))
            assert values["scaler/headroom"] == pytest.approx(room, abs=0.02)
        assert with_gradients < set(values)


def nn_norm(grads: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(grads))


def test_the_norm_is_told_where_nobody_has_clipped() -> None:
    tracker, clipped = KeepingTracker(), KeepingTracker()
    for each, max_norm in ((tracker, None), (clipped, 1e9)):
        with attached(tracker_interval=1) as accelerator:
            for _ in run(accelerator, each, max_norm=max_norm):
                pass
    for (one, step), (other, _) in zip(tracker.told, clipped.told, strict=True):
        assert one["scaler/grad_norm"] == pytest.approx(other["scaler/grad_norm"], rel=1e-5), step


def test_without_the_setting_only_the_script_logs() -> None:
    tracker = KeepingTracker(Writer())
    with attached() as accelerator:
        for window in run(accelerator, tracker):
            accelerator.log({"loss": 1.0}, step=10 * window)
    assert [step for _, step in tracker.told] == [10 * window for window in range(WINDOWS)]
    assert all("scaler/scale" in values for values, _ in tracker.told)
    assert tracker.run.histograms == {}


def test_with_it_what_the_script_logs_is_the_scripts() -> None:
    tracker = KeepingTracker()
    with attached(tracker_interval=2) as accelerator:
        for window in run(accelerator, tracker):
            accelerator.log({"loss": 1.0}, 10 * window)
    own = [(values, step) for values, step in tracker.told if "loss" in values]
    assert own == [({"loss": 1.0}, 10 * window) for window in range(WINDOWS)]
    ours = [step for values, step in tracker.told if "scaler/scale" in values]
    assert ours == [0, 2, 4, 6]


def test_the_end_of_training_tells_the_rest_before_trackers_end() -> None:
    tracker = KeepingTracker()  # which refuses what comes after its end
    with attached(tracker_interval=1) as accelerator:
        for _ in run(accelerator, tracker):
            pass
        accelerator.end_training()
        assert tracker.ended
        assert [step for _, step in tracker.told] == list(range(WINDOWS))


def test_several_micro_batches_and_optimizers_are_one_window() -> None:
    tracker = KeepingTracker(Writer())
    with attached(tracker_interval=1, accumulation=2) as accelerator:
        accelerator.trackers.append(tracker)
        one, other = mlp(), mlp(8)
        a, b, first, second = accelerator.prepare(
            one, other, sgd(one.parameters()), sgd(other.parameters())
        )
        for step in range(4):
            with accelerator.accumulate(a, b):
                accelerator.backward(loss_of(a, step) + loss_of(b, step))
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
    assert [step for _, step in tracker.told] == [0, 1]
    assert {step for _, step in tracker.run.histograms} == {0, 1}
    assert len(tracker.run.histograms) == 2 * len([*one.parameters(), *other.parameters()])


def test_a_tracker_that_begins_late_is_told_from_then_on_and_that_there_is_none_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = KeepingTracker()
    with attached(tracker_interval=1) as accelerator, caplog.at_level(logging.WARNING):
        for window in run(accelerator):
            if window == 3:
                accelerator.trackers.append(tracker)
    assert [step for _, step in tracker.told] == [3, 4, 5, 6]
    (said,) = [r.getMessage() for r in caplog.records if "tracker_interval" in r.getMessage()]
    assert "give Accelerator a log_with and call init_trackers" in said
    assert "Training goes on" in said


def test_trackers_that_were_named_and_not_begun_are_said(caplog: pytest.LogCaptureFixture) -> None:
    reset()
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16", log_with=[KeepingTracker()])
    attach(accelerator, tracker_interval=2)
    with caplog.at_level(logging.WARNING):
        list(run(accelerator))
    detach(accelerator)
    (said,) = [r.getMessage() for r in caplog.records if "tracker_interval" in r.getMessage()]
    assert "init_trackers was not called" in said


def test_one_that_raises_is_said_once_and_the_others_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(KeepingTracker):
        name = "broken"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise ConnectionError("no network")

    fine = KeepingTracker()
    with attached(tracker_interval=1) as accelerator, caplog.at_level(logging.WARNING):
        list(run(accelerator, Broken(), fine))
    assert len(fine.told) == WINDOWS
    said = [r.getMessage() for r in caplog.records if "no network" in r.getMessage()]
    assert said == [
        "the tracker 'broken' could not be sent the scaler's values: ConnectionError: no network. "
        "Training goes on. (Said once.)"
    ]


def test_one_whose_run_has_not_begun_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Unready(KeepingTracker):
        name = "unready"

        @property
        def tracker(self) -> Any:
            raise RuntimeError("start() was not called")

    fine = KeepingTracker()
    with attached(tracker_interval=1) as accelerator, caplog.at_level(logging.WARNING):
        list(run(accelerator, Unready(), fine))
    assert len(fine.told) == WINDOWS
    said = [r.getMessage() for r in caplog.records if "unready" in r.getMessage()]
    assert len(said) == 1
    assert "start() was not called" in said[0]


def test_other_processes_tell_nobody_and_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = KeepingTracker(Writer())
    reset()
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    monkeypatch.setattr(type(accelerator), "process_index", 1)
    attach(accelerator, tracker_interval=1)
    monkeypatch.setattr(type(accelerator), "is_main_process", False)
    list(run(accelerator, tracker))
    attachment = attachment_of(accelerator)
    assert attachment is not None
    assert attachment.recorder.tracked is None
    assert attachment.recorder.wants_norms  # what communicates, all ranks do
    detach(accelerator)
    assert tracker.told == []


def test_a_run_without_scaling_is_told_of_too() -> None:
    reset()
    tracker = KeepingTracker(Writer())
    accelerator: Any = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="training is as before, only trackers are told"):
        attach(accelerator, ScalerConfig(tracker_interval=1))
    for window in run(accelerator, tracker, overflows=(2,)):
        if window == 2:
            break
    detach(accelerator)
    assert [step for _, step in tracker.told] == [0, 1, 2]
    assert "scaler/headroom" not in tracker.told[0][0]
    assert "scaler/loss" in tracker.told[0][0]
    assert {step for _, step in tracker.run.histograms} == {0, 1}  # 2 has no finite element


# --- Accelerate's own classes, each around what it calls ------------------------------------------


class Calls:
    """Keeps the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "add_histogram_raw":
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def told(tracker: Any) -> None:
    with attached(tracker_interval=3) as accelerator:
        list(run(accelerator, tracker))


def test_all_of_accelerates_are_known_here() -> None:
    here = {"aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab", "trackio", "wandb"}
    assert set(LOGGER_TYPE_TO_CLASS) <= here | {"tensorboard"}


def test_comet() -> None:
    tracker = CometMLTracker("run")
    tracker.writer = Calls()
    told(tracker)
    scales = [c for c in tracker.writer.calls if c[0] == "log_metric" and c[1][0] == "scaler/scale"]
    assert scales == [("log_metric", ("scaler/scale", 4096.0), {"step": n}) for n in (0, 3, 6)]


def test_aim() -> None:
    tracker = AimTracker("run")
    tracker.writer = Calls()
    told(tracker)
    calls = [kwargs for _, _, kwargs in tracker.writer.calls]
    scales = [each["step"] for each in calls if each["name"] == "scaler/scale"]
    assert scales == [0, 3, 6]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Calls()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    tracker = MLflowTracker("run")
    tracker.active_run = object()
    told(tracker)
    assert [kwargs["step"] for _, _, kwargs in mlflow.calls] == [0, 3, 6]
    assert all(args[0]["scaler/scale"] == 4096.0 for _, args, _ in mlflow.calls)


def test_clearml() -> None:
    tracker, logger = ClearMLTracker("run"), Calls()
    tracker.task = SimpleNamespace(get_logger=lambda: logger)
    told(tracker)
    scales = [kwargs for _, _, kwargs in logger.calls if kwargs["title"] == "scaler/scale"]
    assert [each["iteration"] for each in scales] == [0, 3, 6]


def test_dvclive_keeps_the_scripts_step() -> None:
    class Live:
        def __init__(self) -> None:
            self.step = 5
            self.rows: list[tuple[int, str]] = []

        def log_metric(self, name: str, val: float) -> None:
            self.rows.append((self.step, name))

    tracker = DVCLiveTracker("run", live=Live())
    told(tracker)
    assert [step for step, name in tracker.live.rows if name == "scaler/scale"] == [0, 3, 6]
    assert tracker.live.step == 5


def test_swanlab() -> None:
    tracker = SwanLabTracker("run")
    tracker.run = Calls()
    told(tracker)
    assert [kwargs for _, _, kwargs in tracker.run.calls] == [{"step": n} for n in (0, 3, 6)]


class Histogram:
    """As wandb's and trackio's."""

    def __init__(self, sequence: Any = None, np_histogram: Any = None, num_bins: int = 64) -> None:
        self.counts, self.edges = np_histogram
        assert len(self.edges) == len(self.counts) + 1


@pytest.mark.parametrize("is_own", [False, True])
def test_trackio_gets_histograms_as_values(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Calls()
    current = SimpleNamespace(get=lambda: own)
    module = SimpleNamespace(Histogram=Histogram, context_vars=SimpleNamespace(current_run=current))
    monkeypatch.setitem(sys.modules, "trackio", module)  # type: ignore[arg-type]
    tracker = LOGGER_TYPE_TO_CLASS.get("trackio")
    if is_own or tracker is None:  # an Accelerate before it knew trackio
        with attached(tracker_interval=3) as accelerator:
            list(run(accelerator))
    else:
        made = tracker("run")
        made.run = own
        told(made)
    logged = [(args[0], kwargs["step"]) for _, args, kwargs in own.calls]
    assert [step for _, step in logged] == [0, 3, 6]
    for values, _ in logged:
        assert values["scaler/scale"] == 4096.0
        assert isinstance(values["scaler/gradients/0.weight"], Histogram)


@pytest.mark.parametrize("is_own", [False, True])
def test_wandb_keeps_the_scripts_steps(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = WandbRun()
    module = SimpleNamespace(Histogram=Histogram, run=own)
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    tracker = LOGGER_TYPE_TO_CLASS["wandb"]("run")
    tracker.run = own
    with attached(tracker_interval=1) as accelerator:
        for window in run(accelerator, *([] if is_own else [tracker])):
            if window % 3 == 2 and is_own:
                own.log({"loss": 1.0}, step=window // 3)
            elif window % 3 == 2:
                accelerator.log({"loss": 1.0}, step=window // 3)
        accelerator.end_training()
    assert not own.dropped
    assert [step for step, row in own.rows.items() if "loss" in row] == [0, 1]
    ours = [row for row in own.rows.values() if "scaler/window" in row]
    assert sorted(row["scaler/window"] for row in ours) == list(range(WINDOWS))
    assert all(isinstance(row["scaler/gradients/0.weight"], Histogram) for row in ours)


def test_after_detach_the_script_still_has_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import atexit

    own, left = WandbRun(), []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", left.remove)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=own))  # type: ignore[arg-type]
    with attached(tracker_interval=1) as accelerator:
        list(run(accelerator))
    own.log({"loss": 1.0}, step=0)
    assert not own.dropped
    (finish,) = left
    finish()  # as the process ends
    assert own.rows[0]["loss"] == 1.0
    assert sorted(row["scaler/window"] for row in own.rows.values()) == list(range(WINDOWS))
