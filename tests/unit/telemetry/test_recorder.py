"""Norms under their parameters' names; and what belongs to no window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from telemetry_runs import attached, batch, noted_in, sgd
from torch import Tensor, nn

from accel_scaler import ScalerConfig
from accel_scaler.console import number as number_of
from accel_scaler.scaling import GradNorm, GradScaler, ParameterNames
from accel_scaler.telemetry.recorder import NameTable, make_recorder


def table_of(*models: nn.Module) -> NameTable:
    names = ParameterNames()
    for model in models:
        names.add_module(model)
    return NameTable(names)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def norm_of(params: Sequence[Tensor], norms: Sequence[float]) -> GradNorm:
    return GradNorm(params, 1.0, torch.tensor(norms))


def told(table: NameTable, *found: GradNorm) -> Any:
    """Pairs of a name and its norm."""
    params = list({id(p): p for each in found for p in each.parameters}.values())
    seen = table.norms(found, torch.optim.SGD(params, lr=1.0))
    return list(zip(seen["names"], seen["norms"], strict=True))


def test_norms_have_the_names_of_the_model_or_else_of_the_optimizer() -> None:
    model, own = chain(), nn.Parameter(torch.zeros(5))
    table, (a, b, c, d) = table_of(model), list(model.parameters())
    expected = [("1.weight", 3.0), ("1.bias", 4.0), ("0.weight", 1.0), ("0.bias", 2.0)]
    assert told(table, norm_of([c, d], [3.0, 4.0]), norm_of([a, b], [1.0, 2.0])) == expected
    unknown = ("parameter 0 of group 0, shape (5,)", 9.0)
    assert told(table, norm_of([own, b], [9.0, 2.0])) == [unknown, ("0.bias", 2.0)]
    assert told(table, norm_of([b, b], [2.0, 2.0])) == [("0.bias", 2.0)] * 2
    nothing = GradNorm([a], 1.0)
    assert table.norms([nothing], torch.optim.SGD([a], lr=1.0)) == {}


def test_a_parameter_at_the_address_of_one_that_is_gone_is_another() -> None:
    """Python gives a freed ``id`` away again; a table by id alone would keep the old name."""
    keep, table = [], table_of()
    for size in range(1, 200):
        p = nn.Parameter(torch.zeros(size))
        keep.append(id(p))
        assert told(table, norm_of([p], [1.0])) == [(f"parameter 0 of group 0, shape ({size},)", 1)]
        del p
    assert len(set(keep)) < len(keep)  # else this has shown nothing


def test_a_model_that_is_known_later_renames_its_parameters() -> None:
    model, names = chain(), ParameterNames()
    table, found = NameTable(names), norm_of(list(model.parameters())[:1], [1.0])
    assert told(table, found) == [("parameter 0 of group 0, shape (3, 2)", 1.0)]
    names.add_module(model)
    assert told(table, found) == [("0.weight", 1.0)]


def test_of_a_model_in_two_modules_each_parameter_is_there_once_and_none_that_is_not_made() -> None:
    names, model = ParameterNames(), nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(1))
    names.add_module(model)
    names.add_module(model[0])
    assert list(map(id, names.parameters())) == list(map(id, model[0].parameters()))


def test_of_what_is_logged_evaluations_are_noted_and_no_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = make_recorder(GradScaler("cpu"), ScalerConfig(telemetry=path), {"rank": 0})
    given = {"eval_loss": 1.5, "val/acc": True, "test_f1": math.nan, "validation/n": 10**400}
    ignored = {"loss": 1.0, "evaluation": 2, "eval_runtime": 3.0, "eval_steps_per_second": 4.0}
    recorder.note({**given, **ignored, "eval_tensor": torch.ones(()), "eval_text": "x", 7: 1.0})
    recorder.note(ignored)
    recorder.close()
    noted = noted_in(path)
    assert noted.pop("host_peak_bytes")
    assert noted == {k: ["nan" if v != v else v] for k, v in given.items()}
    make_recorder(GradScaler("cpu"), ScalerConfig(), {"rank": 0}).note(given)  # there is no file


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize(
    ("rate", "told"), [(0.0, "12 steps, none skipped. "), (0.75, "Diverged: 12 steps, ")]
)
def test_on_a_cpu_the_loss_is_known_without_a_file(precision: str, rate: float, told: str) -> None:
    with attached(None, precision, accumulation=2) as accelerator:
        net = nn.Linear(8, 1)
        model, optimizer = accelerator.prepare(net, sgd(net.parameters(), lr=rate, momentum=0.0))
        seen = []
        for number in range(24):
            with accelerator.accumulate(model):
                loss = (model(batch(number % 2)[0]).float() - 3).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(float(loss))
        records, text = accelerator.scaler_history.records, accelerator.scaler_history.summary()
    means = [sum(seen[at : at + 2]) / 2 for at in range(0, 24, 2)]
    assert [r.loss for r in records] == pytest.approx(means, rel=1e-6)
    assert text.startswith(told)
    ends = means[0], min(means), means[-1]
    assert "Loss: first {}, lowest {}, last {}.".format(*map(number_of, ends)) in text
