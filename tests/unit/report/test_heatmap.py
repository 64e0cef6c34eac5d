"""The heat map as data, and names that stay readable when they are short."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import telemetry_files as t

from accel_scaler.report.formatting import layer_name
from accel_scaler.report.heatmap import HeatMap, heatmap
from accel_scaler.report.reader import read_run

LORA = "base_model.model.model.layers.17.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("name", "limit", "short"),
    [
        ("transformer.h.11.attn.c_proj.weight", 34, "h.11.attn.c_proj"),
        ("h.11.attn.c_proj.weight", 34, "h.11.attn.c_proj.weight"),
        ("transformer.h.11.attn.c_proj.bias", 20, "h.11.attn…bias"),
        (LORA, 34, "layers.17.self_attn.q_proj…default"),
        (LORA, 20, "layers.17…default"),
        ("model.layers.3.weight", 12, "layers.3"),
        ("transformer.wte.weight", 16, "transformer.wte"),
        ("a" * 50, 10, "aaa…aaaaaa"),
        ("", 5, ""),
    ],
)
def test_a_short_name_keeps_the_number_of_its_layer(name: str, limit: int, short: str) -> None:
    assert layer_name(name, limit) == short


def test_no_short_name_is_too_long() -> None:
    for name in (LORA, "1." * 40, "." * 40, "x.7." + "y" * 90, "weight." * 9, "9" * 70):
        for limit in range(3, 40):
            assert len(layer_name(name, limit)) <= limit, (name, limit)


def heat_of(tmp_path: Path, names: list[str], *columns: list[float]) -> HeatMap:
    lines = [t.start(), t.names(names)]
    lines += [t.window(s, norms=t.norms(values)) for s, values in enumerate(columns)]
    heat = heatmap(read_run(t.write(tmp_path / "run.jsonl", lines)))
    assert heat is not None
    return heat


def test_what_all_names_begin_with_goes_but_never_the_layer(tmp_path: Path) -> None:
    names = [f"model.h.{n}.attn.weight" for n in (1, 2, 11)]
    assert heat_of(tmp_path, names, [1.0] * 3).labels(34) == [
        *("1.attn.weight", "2.attn.weight", "11.attn.weight"),
    ]
    alone = [f"model.h.11.{part}.weight" for part in ("attn", "mlp")]
    assert heat_of(tmp_path, alone, [1.0] * 2).labels(34) == ["h.11.attn.weight", "h.11.mlp.weight"]
    assert heat_of(tmp_path, ["weight"], [1.0]).labels(34) == ["weight"]


def test_cells_are_the_norms_of_the_file(tmp_path: Path) -> None:
    heat = heat_of(tmp_path, ["a", "b"], [1.0, 0.5], [0.0, math.inf], [math.nan, 2.0])
    assert [list(row) for row in heat.table] == [[1.0, 0.0, math.inf], [0.5, math.inf, 2.0]]
    assert (heat.columns, heat.rows, heat.stride) == ([0, 1, 2], [["a"], ["b"]], 1)
    assert (heat.low, heat.high) == (0.5, 2.0)
    assert "2 of 6 cells inf or NaN" in heat.in_words()
