"""``accel-scaler launch`` of unchanged scripts in real processes, beside ``accelerate launch``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import launching
import pytest
from children import free_port
from launching import OURS, STOCK, facts_in
from places import HELPERS, ROOT

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.launch.launcher import STARTUP

SETTINGS = ScalerConfig(init_scale=1024.0, step_mode="overlap", max_consecutive_skips=9)
SECTION = """
accel_scaler:
  step_mode: overlap
  init_scale: 4096      # a variable outranks it
  max_consecutive_skips: 8   # a flag outranks it
"""
VARIABLE = {"ACCEL_SCALER_INIT_SCALE": "1024"}
FLAG = ["--max_consecutive_skips", "9"]
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: "NO"
use_cpu: true
mixed_precision: fp16
num_machines: 1
num_processes: 1
"""


def run(
    command: list[Any], folder: Path, stdin: str = "", **extra: str
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, the facts that ranks printed, and all of standard error."""
    code, out, err = launching.run(command, folder, stdin, TMPDIR=str(folder / "tmp"), **extra)
    assert not list((folder / "tmp").glob("accel_scaler_*")), "a temporary file was left"
    return code, facts_in(out), err


def as_found(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what training, not starting, determines."""
    return {key: value for key, value in facts.items() if key not in ("trained", "child_class")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "launched_script.py").write_text((HELPERS / "launched_script.py").read_text())
    (tmp_path / "with.yaml").write_text(CONFIG + SECTION)
    (tmp_path / "stock.yaml").write_text(CONFIG)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_an_unchanged_script_trains_attached_and_sees_no_difference(folder: Path) -> None:
    # Beside it: accelerate launch of the same script, which then calls attach() itself.
    script = ["launched_script.py", "--stdin", "--spawn", "--exit", "3", "--min_scale", "x y"]
    code, (stock,), _ = run(
        [*STOCK, "--config_file", "stock.yaml", *script],
        folder,
        "from stdin\n",
        CALL_ATTACH="1",
        **SETTINGS.to_env(),
    )
    assert code == 1, "Accelerate's own launcher has kept the exit status: ours need not mend it"
    status, (ours,), err = run(
        [*OURS, "--config_file", "with.yaml", *FLAG, *script], folder, "from stdin\n", **VARIABLE
    )
    assert status == 3
    assert err.splitlines()[-2:] == [
        # Of the script's Accelerator; that in the process that it spawns has no window.
        "accel-scaler: 6 steps, 1 skipped",
        "accel-scaler: launched_script.py ended with status 3",
    ]
    assert "Traceback" not in err
    assert as_found(ours) == as_found(stock)
    assert ours["argv"] == script[1:]
    assert (ours["name"], ours["spec"], ours["argv0"]) == ("__main__", None, script[0])
    assert ours["traceback"] == [str(folder / script[0])] * 2
    assert ours["stdin"] == "from stdin\n"
    assert ours["child"] == ["from the child", "__main__"]
    # Every Accelerator is attached, in spawned processes too.
    assert (stock["child_class"], ours["child_class"]) == ("Accelerator", "ScaledAccelerator")
    trained = ours["trained"]
    assert trained == stock["trained"]
    assert trained["class"] == "ScaledAccelerator"
    assert trained["skipped"] == [False, False, True, False, False, False]
    # 1024, grown after two good steps, backed off, grown after two more.
    assert trained["scale"] == 2048.0
    assert trained["settings"] == SETTINGS.to_env()


def test_two_ranks_of_a_module_train_attached(folder: Path) -> None:
    code, facts, err = run(
        [*OURS, "--multi_gpu", "--num_processes", "2", "--mixed_precision", "fp16",
         "--main_process_port", str(free_port()), "--step_mode", "overlap",
         "--telemetry", "{rank}.jsonl", "-m", "launched_script", "--exit", "5"],
        folder, ACCELERATE_USE_CPU="true", ACCEL_SCALER_INIT_SCALE="1024",
    )  # fmt: skip
    assert code == 5
    assert "Root Cause" in err
    assert "Traceback" not in err
    assert [found["rank"] for found in facts] == [0, 1]
    for found in facts:
        assert found["spec"] == "launched_script"
        assert found["argv"] == ["--exit", "5"]
        assert found["path"][0] == str(folder)
        assert STARTUP not in found["path"]
        trained = found["trained"]
        assert (trained["class"], trained["ranks"]) == ("ScaledAccelerator", 2)
        assert trained["scale"] == facts[0]["trained"]["scale"]
        assert trained["weights"] == facts[0]["trained"]["weights"]
        assert trained["settings"] == {
            "ACCEL_SCALER_INIT_SCALE": "1024.0",
            "ACCEL_SCALER_STEP_MODE": "overlap",
            "ACCEL_SCALER_TELEMETRY": "{rank}.jsonl",
        }


OTHER_WAYS = """
import os, sys, warnings
import sitecustomize
from accelerate import Accelerator
import json

class Mine(Accelerator):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.after = type(self).__name__

warnings.simplefilter("error")
found = {"next": getattr(sitecustomize, "NEXT", None), "argv": sys.argv, "name": __name__}
scale = os.environ.pop("ACCEL_SCALER_INIT_SCALE")
plain = Accelerator(cpu=True, mixed_precision="no")
again = Accelerator(cpu=True)
os.environ["ACCEL_SCALER_INIT_SCALE"] = scale
found["plain"] = [type(plain).__name__, type(again).__name__, plain.scaler]
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(True)
mine = Mine(mixed_precision="fp16")
found["mine"] = [type(mine).__name__, isinstance(mine, Mine), mine.scaler.get_scale()]
print("FACTS " + json.dumps(found))
"""


def test_a_shell_script_that_feeds_python_a_script_on_stdin(folder: Path) -> None:
    site = folder / "site"
    site.mkdir()
    site.joinpath("sitecustomize.py").write_text("NEXT = 'ran'")
    folder.joinpath("other.py").write_text(OTHER_WAYS)
    wrapper = folder / "run.sh"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} - "$@" < other.py\n')
    wrapper.chmod(0o755)
    path = os.pathsep.join([str(site), str(ROOT)])
    code, (found,), err = run(
        [*OURS, "--cpu", "--init_scale", "64", "--no_python", "./run.sh", "a b"],
        folder, PYTHONPATH=path,
    )  # fmt: skip
    assert code == 0, err
    assert (found["argv"], found["name"]) == (["-", "a b"], "__main__")
    assert found["next"] == "ran"
    assert found["plain"] == ["ScaledAccelerator", "ScaledAccelerator", None]
    assert found["mine"] == ["ScaledMine", True, 64.0]


TRAINER = """
import json
from trainer_support import arguments, examples, gpt2
from transformers import Trainer

def made():
    return Trainer(gpt2((1,)), arguments("hf", max_steps=4), train_dataset=examples(16))

def weights(model):
    return [value.data.double().sum().item() for value in model.parameters()]

if __name__ == "__main__":
    trainer = made()
    trainer.train()
    found = {
        "class": [cls.__name__ for cls in type(trainer).__mro__],
        "accelerator": type(trainer.accelerator).__name__,
        "scale": trainer.accelerator.scaler.get_scale(),
        "weights": weights(trainer.model),
    }
    print("FACTS " + json.dumps(found), flush=True)
"""


def test_a_trainer_is_attached_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "launched_trainer.py").write_text(TRAINER)
    command = [*OURS, "--config_file", "with.yaml", "launched_trainer.py"]
    code, (found,), err = run(command, folder, **VARIABLE)
    assert code == 0, err
    assert re.search(r"^accel-scaler: \d+ steps, 1 skipped$", err, re.MULTILINE)
    # ScaledTrainer ends train() with a fence; its accelerator alone would not.
    assert "ScaledTrainer" in found["class"]
    assert found["accelerator"] == "ScaledAccelerator"
    assert found["scale"] == 512.0  # one overflow
    monkeypatch.chdir(folder)
    launched_trainer: Any = {"__name__": "launched_trainer"}
    exec(TRAINER, launched_trainer)
    trainer = attach(launched_trainer["made"](), SETTINGS)
    trainer.train()
    assert found["weights"] == launched_trainer["weights"](trainer.model)
    detach(trainer)
