"""``accel-scaler launch`` of unchanged scripts in real processes, beside ``accelerate launch``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launching
import psutil
import pytest
from children import free_port
from launching import OURS, STOCK, facts_in, finish, start
from places import HELPERS, ROOT

from accel_scaler import ScalerConfig, attach
from accel_scaler.integrations import cpu_float16
from accel_scaler.launch.launcher import STARTUP

HAS_KERNELS = cpu_float16.has_float16_kernels
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
        "accel-scaler: launched_script.py exited with status 3",
        # Of the script's Accelerator, and not of that in the process that it spawns.
        "accel-scaler: 6 windows, 1 skipped",
    ]
    assert "Traceback" not in err
    assert as_found(ours) == as_found(stock)
    assert ours["argv"] == script[1:]
    assert (ours["name"], ours["spec"], ours["argv0"]) == ("__main__", None, script[0])
    assert ours["traceback"] == [str(folder / script[0])] * 2
    assert ours["stdin"] == "from stdin\n"
    assert ours["child"] == ["from the child", "__main__"]
    # Every Accelerator is attached, those of spawned processes too.
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
    last = err.splitlines()[-1]  # where torchrun has ended rank 0 first, it has not told
    counts = last.removeprefix("accel-scaler: 6 windows, 1 skipped; to see them: ")
    assert counts.removeprefix("accel-scaler: to see them: ") == "accel-scaler report 0.jsonl"
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
import os, sys, traceback, warnings
import sitecustomize
from accelerate import Accelerator
from accel_scaler import OrderError, ScaledAccelerator, ScalerConfig, attach, detach
import json

class Mine(Accelerator):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.after = type(self).__name__

warnings.simplefilter("error")
found = {"next": getattr(sitecustomize, "NEXT", None), "argv": sys.argv, "name": __name__}
import accelerate.accelerator
found["loader"] = sorted(vars(accelerate.accelerator.__loader__))
plain = Accelerator(cpu=True, mixed_precision="no")
again = Accelerator(cpu=True)
found["plain"] = [type(plain).__name__, type(again).__name__, plain.scaler]
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(True)
mine = Mine(mixed_precision="fp16")
found["mine"] = [type(mine).__name__, isinstance(mine, Mine), mine.scaler.get_scale()]
own = ScaledAccelerator(scaler_config=ScalerConfig(init_scale=8.0))
found["own"] = [own.scaler.get_scale(), detach(own).scaler]
found["attached"] = attach(mine) is mine
found["outranked"] = attach(mine, ScalerConfig(init_scale=16.0)).scaler.get_scale()
try:
    attach(mine, ScalerConfig(init_scale=32.0))
except OrderError:
    found["outranked once"] = mine.scaler.get_scale()
found["detached"] = type(detach(mine)).__name__
try:
    Accelerator(mixed_precision="no such")
except ValueError as error:
    found["frames"] = [f.name for f in traceback.extract_tb(error.__traceback__)]
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
    assert found["loader"] == ["name", "path"], "the loader is not as Python made it"
    # Without fp16 there is nothing to attach, and one line that says so.
    assert found["plain"] == ["Accelerator", "Accelerator", None]
    assert err.count("mixed_precision='no' needs no gradient scaling") == 1
    assert found["mine"] == ["ScaledMine", True, 64.0]
    assert found["own"] == [8.0, None], "attached twice: detach() did not find the stock scaler"
    assert found["attached"]
    assert (found["outranked"], found["outranked once"]) == (16.0, 16.0)
    assert found["detached"] == "Mine"
    # One frame of ours, and only where an Accelerator itself fails.
    assert found["frames"].count("__init__") == 2 + found["frames"][3:].count("__init__")


def test_a_trainer_is_attached_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", HAS_KERNELS)  # as in the process
    script = HELPERS / "launched_trainer.py"
    code, (found,), err = run(
        [*OURS, "--config_file", "with.yaml", script, "out"], folder, **VARIABLE
    )
    assert code == 0, err
    assert re.fullmatch(r"accel-scaler: \d+ windows, 1 skipped", err.splitlines()[-1])
    # ScaledTrainer ends train() with a fence; its accelerator alone would not.
    assert "ScaledTrainer" in found["class"]
    assert found["accelerator"] == "ScaledAccelerator"
    assert found["scale"] == 512.0  # one overflow
    import launched_trainer

    trainer = attach(launched_trainer.ordinary(folder), SETTINGS)
    trainer.train()
    assert found["weights"] == launched_trainer.weights(trainer.model)
    # What a script gives attach() outranks the launcher, for accelerators to come as well.
    trainer.accelerator._attachment.is_default = True
    trainer.model.zero_grad()
    attach(trainer, ScalerConfig(init_scale=64.0))
    assert trainer._scaler_config == trainer.accelerator._attachment.config
    assert trainer._scaler_config == ScalerConfig(init_scale=64.0)


WAITS = """
import os, signal, sys, time
from pathlib import Path

def told(number, frame):
    Path("told").write_text(str(number))
    sys.exit(7)

signal.signal(signal.SIGTERM, told)
Path("up" + os.environ.get("RANK", "0")).write_text("")
time.sleep(300)
"""


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)]
)
def test_a_launcher_that_is_told_to_end_ends_the_script(
    folder: Path, number: int, ranks: int
) -> None:
    folder.joinpath("waits.py").write_text(WAITS)
    command = [*OURS, "--config_file", "with.yaml"]
    if ranks > 1:
        command += ["--multi_gpu", "--num_processes", str(ranks)]
        command += ["--main_process_port", str(free_port())]
    process = start([*command, "waits.py"], folder, TMPDIR=str(folder / "tmp"))
    for rank in range(ranks):
        wait_for(folder / f"up{rank}", process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == ranks
    assert list((folder / "tmp").glob("accel_scaler_*"))
    if number == signal.SIGTERM:
        process.send_signal(number)  # the launcher alone, as `kill` and schedulers do
    else:
        os.killpg(process.pid, number)  # all of them, as a terminal does
    status, _, err = finish(process)
    # The status is the script's own, which has a handler for SIGTERM; torchrun's is its signal's.
    assert status == (7 if number == signal.SIGTERM and ranks == 1 else 128 + number)
    assert not any(child.is_running() for child in family)
    assert not list((folder / "tmp").glob("accel_scaler_*"))
    if number == signal.SIGTERM:
        assert (folder / "told").read_text() == str(int(signal.SIGTERM))
        assert "accel_scaler/" not in err, "a traceback of ours"


FAILS = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
Path("pid" + rank).write_text(str(os.getpid()))
while not Path("pid0").exists():
    time.sleep(0.05)
if rank == "1":
    sys.exit(6)
time.sleep(300)
"""


def test_a_rank_that_fails_ends_the_others(folder: Path) -> None:
    folder.joinpath("fails.py").write_text(FAILS)
    code, _, err = run(
        [*OURS, "--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port()),
         "fails.py"],
        folder, ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert code == 6
    assert "rank      : 1" in err
    assert not psutil.pid_exists(int((folder / "pid0").read_text()))
