"""Alerts: by wandb's and trackio's own signatures, a number elsewhere; none ends training."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import weakref
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from support import mlp, reset
from telemetry_runs import INF, loss_of, sgd
from trainer_support import CONFIG, make, train

from accel_scaler import OverflowStreakError, ScalerConfig, attach, detach
from accel_scaler.integrations.trackers import KEY

pytestmark = pytest.mark.usefixtures("one_thread")


class WandbRun:
    """As wandb's: it takes the level as text, and refuses others."""

    def __init__(self) -> None:
        self.alerts: list[tuple[str, str, Any]] = []

    def alert(
        self, title: str, text: str, level: str | None = None, wait_duration: float | None = None
    ) -> None:
        if level not in ("INFO", "WARN", "ERROR") or len(title) >= 64:
            raise ValueError(level)
        self.alerts.append((title, text, level))


class AlertLevel(str, Enum):
    """As trackio's."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class TrackioRun:
    """As trackio's: it takes no text for a level."""

    def __init__(self) -> None:
        self.alerts: list[tuple[str, str | None, Any]] = []

    def alert(
        self,
        title: str,
        text: str | None = None,
        level: AlertLevel = AlertLevel.WARN,
        step: int | None = None,
        webhook_url: str | None = None,
    ) -> None:
        self.alerts.append((title, text, level.value))


class Tracker(GeneralTracker):  # type: ignore[misc]
    """A tracker of Accelerate's with a run of ours in it."""

    name = "other"
    requires_logging_directory = False

    def __init__(self, name: str, run: Any) -> None:
        self.name = name
        super().__init__()
        self.run = run
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((values, step))

    @property
    def alerts(self) -> list[tuple[int, int | None]]:
        return [(values[KEY], step) for values, step in self.logged if KEY in values]


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def begin_wandb(monkeypatch: pytest.MonkeyPatch) -> WandbRun:
    run = WandbRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))  # type: ignore[arg-type]
    return run


def begin_trackio(monkeypatch: pytest.MonkeyPatch) -> TrackioRun:
    run: TrackioRun = TrackioRun()
    current: ContextVar[Any] = ContextVar("current_run", default=run)
    module: Any = SimpleNamespace(
        AlertLevel=AlertLevel, context_vars=SimpleNamespace(current_run=current)
    )
    monkeypatch.setitem(sys.modules, "trackio", module)
    return run


class Loop:
    """An attached accelerator and a model that may overflow."""

    def __init__(self, *trackers: Tracker, **settings: Any) -> None:
        reset()
        self.accelerator: Any = Accelerator(
            cpu=True, mixed_precision="fp16", log_with=list(trackers)
        )
        attach(self.accelerator, ScalerConfig(**({"init_scale": 2.0**40} | settings)))
        self.accelerator.init_trackers("run")
        plain = mlp()
        self.model, self.optimizer = self.accelerator.prepare(plain, sgd(plain.parameters()))

    def skip(self, count: int) -> None:
        for _ in range(count):
            self.step(INF)

    def step(self, factor: float = 1.0) -> None:
        self.accelerator.backward(loss_of(self.model, 0) * factor)
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()


def test_wandb_is_alerted_of_a_streak_with_what_the_log_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wandb = Tracker("wandb", WandbRun())
    loop = Loop(wandb)
    loop.skip(29)
    assert wandb.run.alerts == []
    loop.skip(1)
    (said,) = [r.getMessage() for r in caplog.records if "30 windows in a row" in r.getMessage()]
    ((title, text, level),) = wandb.run.alerts
    assert (title, level) == ("30 windows in a row overflowed", "WARN")
    assert said == f"{text} (Said again after 300.)"
    loop.step()  # an end of the streak: the next one is the same cause
    loop.skip(30)
    streaks = [a for a in wandb.run.alerts if "in a row" in a[0]]
    assert len(streaks) == 1
    assert wandb.alerts == []
    detach(loop.accelerator)


def test_trackio_is_alerted_with_a_level_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_trackio(monkeypatch)
    trackio = Tracker("trackio", TrackioRun())
    loop = Loop(trackio, init_scale=64.0, min_scale=16.0)
    loop.skip(5)
    ((title, text, level),) = trackio.run.alerts
    assert (title, level) == ("The loss scale is at its floor", "warn")
    assert text is not None
    assert "min_scale=16" in text
    active = sys.modules["trackio"].context_vars.current_run.get()
    assert active.alerts == []  # it was told as a tracker, not twice
    detach(loop.accelerator)


def test_the_end_of_a_run_is_an_error() -> None:
    wandb, other = Tracker("wandb", WandbRun()), Tracker("other", None)
    loop = Loop(wandb, other, max_consecutive_skips=3, init_scale=2.0**12, find_overflow="off")
    with pytest.raises(OverflowStreakError) as caught:
        loop.skip(10)
    assert [(title, level) for title, _, level in wandb.run.alerts] == [
        ("1 window in a row overflowed", "WARN"),
        ("Too many overflows in a row ended the run", "ERROR"),
    ]
    assert wandb.run.alerts[-1][1] == f"OverflowStreakError: {caught.value}"
    assert other.alerts == [(2, None), (4, None)]


def test_other_trackers_get_a_number_at_the_users_own_step_and_text_where_they_have_it() -> None:
    texts = []
    writer = SimpleNamespace(add_text=lambda *args, **kwargs: texts.append((args, kwargs)))
    board, plain = Tracker("tensorboard", writer), Tracker("mine", None)
    loop = Loop(board, plain, init_scale=64.0, min_scale=32.0)
    loop.accelerator.log({"loss": 1.0}, step=17)
    loop.skip(1)
    assert board.alerts == plain.alerts == [(3, 17)]
    (((key, text), where),) = texts
    assert (key, where) == (KEY, {"global_step": 17})
    assert text.startswith("The loss scale is at its floor: Window 0 overflowed")
    detach(loop.accelerator)


def test_a_tracker_too_old_for_alerts_gets_the_number() -> None:
    old = Tracker("wandb", SimpleNamespace())
    loop = Loop(old, init_scale=64.0, min_scale=32.0)
    loop.skip(1)
    assert old.alerts == [(3, None)]
    detach(loop.accelerator)


def test_runs_that_the_script_began_by_itself_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, trackio = begin_wandb(monkeypatch), begin_trackio(monkeypatch)
    loop = Loop(init_scale=64.0, min_scale=32.0)
    loop.skip(3)
    assert len(wandb.alerts) == len(trackio.alerts) == 1
    detach(loop.accelerator)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_module_without_a_run_is_no_tracker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    none: ContextVar[Any] = ContextVar("current_run", default=None)
    modules = [SimpleNamespace(), SimpleNamespace(run=None)]
    modules += [SimpleNamespace(context_vars=SimpleNamespace(current_run=none))]
    for module in modules:
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        loop = Loop(init_scale=64.0, min_scale=32.0)
        loop.skip(1)
        detach(loop.accelerator)


def test_what_a_tracker_raises_is_said_once_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("no network")

    broken, fine = Tracker("wandb", SimpleNamespace(alert=fail)), Tracker("fine", None)
    loop = Loop(broken, fine, init_scale=2.0**20, min_scale=1.0)
    with caplog.at_level(logging.WARNING):
        loop.skip(40)  # the floor, then a streak
    assert [cause for cause, _ in fine.alerts] == [3, 2]
    said = [r.getMessage() for r in caplog.records if "could not be sent" in r.getMessage()]
    assert said == [
        "the tracker 'wandb' could not be sent an alert: ConnectionError: no network. Training "
        "goes on. (Said once.)"
    ]
    loop.step()
    assert loop.accelerator.scaler_history.boundaries == 41
    detach(loop.accelerator)


def test_only_the_main_process_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = begin_wandb(monkeypatch), Tracker("mine", None)
    loop = Loop(plain, init_scale=64.0, min_scale=32.0)
    monkeypatch.setattr(type(loop.accelerator), "is_main_process", False)
    loop.skip(2)
    assert (run.alerts, plain.alerts) == ([], [])
    detach(loop.accelerator)


def test_a_healed_module_is_told_of_and_said_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin_wandb(monkeypatch)
    loop = Loop(init_scale=64.0)
    loop.accelerator.backward(loss_of(loop.model, 0))
    loop.accelerator.scaler.window.healed = ("0",)
    loop.optimizer.step()
    ((title, text, level),) = run.alerts
    assert (title, level) == ("1 module runs in float32 now", "INFO")
    assert "fp32_modules: ['0']" in text
    assert loop.accelerator.scaler_history.progress() == {"scale": 64, "skips": 0, "healed": 1}
    with caplog.at_level(logging.WARNING):
        loop.accelerator.end_training()
        loop.accelerator.end_training()
        detach(loop.accelerator)
    said = [r.getMessage() for r in caplog.records if "healed" in r.getMessage()]
    assert said == [
        "Trained with 1 module healed: put `fp32_modules: ['0']` into the config. 1 window, none "
        "skipped."
    ]


def test_a_scaler_that_is_copied_or_outlives_its_accelerator_tells_nobody() -> None:
    loop = Loop(init_scale=64.0)
    scaler = loop.accelerator.scaler
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.overflow_streak.listener is None
    assert scaler.overflow_streak.listener is not None
    recorder = weakref.ref(loop.accelerator._attachment.recorder)
    detach(loop.accelerator)
    assert scaler.overflow_streak.listener is None
    del loop
    gc.collect()
    assert recorder() is None


def test_a_trainers_log_carries_the_number_and_its_callbacks_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin_wandb(monkeypatch)
    trainer, _ = make(tmp_path)
    attach(trainer, ScalerConfig(**CONFIG.changed(), min_scale=CONFIG.init_scale))
    train(trainer)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    alerts = [entry.get("scaler_alert") for entry in logged]
    assert [a for a in alerts if a is not None] == [3]
    assert [level for _, _, level in run.alerts] == ["WARN"]
    skipped = [i for i, entry in enumerate(logged) if entry["scaler_skips"]]
    assert alerts.index(3) == skipped[0]
    assert torch.isfinite(next(trainer.model.parameters())).all()
    detach(trainer)
