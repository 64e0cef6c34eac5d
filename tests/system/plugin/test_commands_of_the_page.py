"""The commands of docs/other-libraries.md whose scripts are installed, in fp16 on a CPU."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from launching import OURS, run
from places import ROOT

pytest.importorskip("datasets")

from small_models import write_inputs

STEPS = 3
SFT = (
    f"--output_dir out --use_cpu --max_steps {STEPS} --report_to none "
    "--per_device_train_batch_size 4"
)
FACTORY = {
    "run.yaml": "{model_name_or_path: llama, stage: sft, do_train: true, finetuning_type: full, "
    "dataset: own, dataset_dir: ., template: default, output_dir: out, fp16: true, "
    f"use_cpu: true, max_steps: {STEPS}, report_to: none}}",
    "src/train.py": "from llamafactory.train.tuner import run_exp\n\nrun_exp()\n",
    "dataset_info.json": '{"own": {"file_name": "own.json"}}',
    "own.json": json.dumps([{"instruction": "abc", "input": "", "output": "bcd"}] * 32),
}


@pytest.mark.process
@pytest.mark.parametrize("library", ["TRL", "LLaMA-Factory"])
def test_a_command_of_the_page(library: str, tmp_path: Path) -> None:
    if library == "TRL":
        pytest.importorskip("trl", minversion="1.0", reason="an older one has other scripts")
    else:
        pytest.importorskip("llamafactory")
    page = (ROOT / "docs/other-libraries.md").read_text("utf-8")
    (part,) = [part for part in page.split("\n## ") if part.startswith(f"{library}\n")]
    (line,) = re.findall(r"```\naccel-scaler launch (.+)\n```", part)
    write_inputs(tmp_path)
    (tmp_path / "src").mkdir()
    for name, inside in FACTORY.items():
        (tmp_path / name).write_text(inside, encoding="utf-8")
    if library == "TRL":
        line = f"{line.replace('MODEL', 'llama').replace('DATA', 'texts')} {SFT}"
    command = [*OURS, "--cpu", "--telemetry", "run.jsonl", *shlex.split(line)]
    code, out, err = run(command, tmp_path)
    assert code == 0, out + err
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert [line["scale"] > 1 for line in lines if line["kind"] == "window"] == [True] * STEPS
