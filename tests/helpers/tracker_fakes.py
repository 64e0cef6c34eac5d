"""Trackers that keep what they are told, with the signatures of the libraries."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

Told = list[tuple[dict[str, Any], int | None]]


class Writer:
    """As TensorBoard's, for histograms; the rest is ``KeepingTracker``'s."""

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, int], dict[str, Any]] = {}

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: int,
        sum: float,
        sum_squares: float,
        bucket_limits: list[float],
        bucket_counts: list[int],
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        assert global_step is not None
        assert (tag, global_step) not in self.histograms
        self.histograms[tag, global_step] = {
            "min": min,
            "max": max,
            "num": num,
            "sum": sum,
            "sum_squares": sum_squares,
            "limits": bucket_limits,
            "counts": bucket_counts,
        }


class KeepingTracker(GeneralTracker):  # type: ignore[misc]
    """A user's own: all that is asked of one."""

    name = "keeping"
    requires_logging_directory = False

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        self.run = run
        self.told: Told = []
        self.ended = False

    @property
    def tracker(self) -> Any:
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        assert not self.ended
        self.told.append((dict(values), step))

    def finish(self) -> None:
        self.ended = True


class WandbRun:
    """As wandb's run, with its rule: what comes with a lower step than the last is dropped."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.dropped: Told = []
        self.summary: dict[str, Any] = {}
        self.axes: dict[str, Any] = {}
        self.step = 0
        self.ended = False

    def define_metric(self, name: str, step_metric: Any = None, hidden: bool | None = None) -> None:
        self.axes[name] = step_metric

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        assert not self.ended
        if step is not None and step < self.step:
            self.dropped.append((data, step))
            return
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(data)
        self.summary |= data
        if commit or (commit is None and step is None):
            self.step += 1

    def finish(self) -> None:
        self.ended = True
