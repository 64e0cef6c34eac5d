"""A process, or one of two ranks, is signalled, killed or stopped within an update: how it ends.

In ``sync`` a signal comes inside the optimizer's step; else while the optimizer thread makes a
slow update that the training thread waits for or runs beside. Run as a script, this file is the
process whose forks these are: each case one fork, or two gloo ranks, ended by Python's own exit. It
leaves ``<case><rank>.txt``, what was printed, and ``ended.json``: exit statuses, and the seconds
from the fault to the end of rank 0.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from children import RANKS, become_rank, fork, free_port
from fault_run import MODES, Run
from launching import run
from support import mlp, same
from torch import nn

from accel_scaler import ScalerConfig, attach
from accel_scaler.optimizer_step.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_S = 90
WINDOW = 4
"""The fault happens in the update of this window; on rank 1, where there are two ranks."""
SLOW_S = 0.3
"""How long the update that is interrupted still takes on the optimizer thread."""
TIMEOUT_S = 3
"""Of gloo, where a rank is stopped."""
SIGNALS = ("ctrl-c saved", "sigterm saved")
FAULTS = ("killed", "stopped", "raises")
CASES = {f"{fault}, {mode}": 1 for fault in SIGNALS for mode in MODES}
CASES |= {f"{fault}, overlap": RANKS for fault in FAULTS}


def exit_on_signal(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def meet_signal(case: str, folder: Path) -> None:
    """The process meets the signal in window ``WINDOW``, within its update."""
    ending, mode = case.split(", ")
    signal.signal(signal.SIGTERM, exit_on_signal)
    run = Run(mode, telemetry=str(folder / f"{case}.jsonl"))
    # Windows 2, 6 and 7 overflow, so window 4 has the fourth update.
    updates = itertools.count(1)

    def send() -> None:
        if next(updates) == WINDOW:
            (folder / f"{case} at").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGINT if ending.startswith("ctrl") else signal.SIGTERM)
            time.sleep(SLOW_S)

    step, step_part = torch.optim.SGD.step, Replica.step_part

    def inline(self: Any, closure: Any = None) -> Any:
        send()
        return step(self, closure)

    def on_worker(self: Replica, *args: Any) -> None:
        send()
        step_part(self, *args)

    if mode == "sync":
        run.optimizer.optimizer.step = inline.__get__(run.optimizer.optimizer)
    else:
        Replica.step_part = on_worker  # type: ignore[method-assign]
    try:
        run.train()
    finally:
        run.accelerator.save_state(str(folder / f"{case} saved"))


def train_rank(case: str, rank: int, folder: Path) -> None:
    fault, mode = case.split(", ")
    timeout = timedelta(seconds=TIMEOUT_S if fault == "stopped" else LIMIT_S)
    group = InitProcessGroupKwargs(backend="gloo", timeout=timeout)
    plain = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[group])
    accelerator: Any = attach(plain, ScalerConfig(step_mode=mode, init_scale=1024.0))
    layers = mlp()
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    step_part, steps = Replica.step_part, itertools.count()  # of one part each

    def disturbed(self: Replica, *args: Any) -> None:
        time.sleep(0.2 if fault == "killed" else 0.0)  # at work when the other rank is gone
        if next(steps) == WINDOW and fault == "raises" and rank == 1:
            raise ArithmeticError("the kernel of rank 1 failed")
        step_part(self, *args)

    Replica.step_part = disturbed  # type: ignore[method-assign]
    for window in range(2 * WINDOW):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * window + rank))
        accelerator.backward(nn.functional.mse_loss(model(x).float(), x[:, :1]))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if rank == 1 and window == WINDOW and fault in ("killed", "stopped"):
            (folder / f"{case} at").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        optimizer.zero_grad()
        print("window", window, flush=True)
    accelerator.end_training()


def main(folder: Path) -> tuple[str, int] | None:
    """In a child its case and rank; None in the parent, once all are over."""
    warm = Run("sync").train(1)  # what is imported on first use, too
    warm.accelerator.save_state(str(folder / "warm"))
    warm.close()
    found: dict[str, Any] = {}
    for case, ranks in CASES.items():
        port, pids = free_port(), []
        for rank in range(ranks):
            pids.append(fork(folder / f"{case}{rank}.txt", LIMIT_S))
            if not pids[-1]:
                if ranks > 1:
                    become_rank(rank, port)
                return case, rank
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])]
        at, ended = folder / f"{case} at", time.monotonic()
        if case.startswith("stopped"):
            os.kill(pids[1], signal.SIGKILL)
        statuses += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[1:]]
        after = ended - float(at.read_text()) if at.exists() else None
        found[case] = {"statuses": statuses, "after_s": after}
    (folder / "ended.json").write_text(json.dumps(found))
    return None


MAX_S = 30.0
"""How long a process may go on, or hang, after the fault; a rank with gloo's limit of 90."""
ENDS: dict[str, tuple[list[int], float, tuple[str, ...]]] = {
    "ctrl-c saved": ([-signal.SIGINT], MAX_S, ("KeyboardInterrupt",)),
    "sigterm saved": ([128 + signal.SIGTERM], MAX_S, ()),
    # The connection is closed, nobody waits for a timeout.
    "killed": ([1, -signal.SIGKILL], MAX_S, ("Traceback", "gloo")),
    # It may come back, so the other waits as long as its group allows, and no longer.
    "stopped": ([1, -signal.SIGKILL], TIMEOUT_S + MAX_S, ("Traceback", f"{TIMEOUT_S}000ms")),
    "raises": ([1, 1], MAX_S, ("Traceback", "gloo")),
}
"""Exit statuses, the limit in seconds, what rank 0 prints."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    code, out, err = run([sys.executable, __file__, folder], folder)
    assert code == 0, out + err
    return folder, json.loads((folder / "ended.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_with_its_own_status_in_time(ended: Any, case: str) -> None:
    folder, ends = ended
    fault, _ = case.split(", ")
    statuses, limit, printed = ENDS[fault]
    output = (folder / f"{case}0.txt").read_text()
    assert ends[case]["statuses"] == statuses, output  # -14: it hung for LIMIT_S
    assert (ends[case]["after_s"] or 0.0) < min(limit, LIMIT_S)
    assert all(part.lower() in output.lower() for part in printed), output
    if fault in SIGNALS:
        assert "StepError" not in output, "the interrupt was taken for a failure of the optimizer"
        lines = (folder / f"{case}.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in lines]
        assert (kinds[0], kinds[-1]) == ("start", "end")
    elif fault == "raises":
        other = (folder / f"{case}1.txt").read_text()
        assert "StepError" in other
        assert "the kernel of rank 1 failed" in other
    else:
        assert f"window {WINDOW - 1}" in output
        assert f"window {WINDOW + 1}" not in output, "it trained on alone"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", SIGNALS)
def test_what_was_saved_then_has_the_update_whole(ended: Any, ending: str, mode: str) -> None:
    """An asynchronous one was finished; in ``sync``, where the signal comes before the first
    kernel, nothing has moved but the scale."""
    reference = Run(mode).train(WINDOW + (mode != "sync"))
    expected = reference.state()
    expected["scaler"] = reference.train(WINDOW + 1).state()["scaler"]
    reference.close()
    resumed = Run(mode)
    resumed.accelerator.load_state(str(ended[0] / f"{ending}, {mode} saved"))
    mine = resumed.state()
    resumed.close()
    for key in ("weights", "state", "scaler"):
        assert same(mine[key], expected[key]), key


HANGS = """
import threading
import torch
from accel_scaler.async_optimizer import worker as worker
from accel_scaler.optimizer_step.replica import Replica
from fault_run import Run

worker.EXIT_LIMIT_S = 0.5
torch.set_num_threads(1)
run = Run("overlap").train(3)
run.optimizer.synchronize()
begun = threading.Event()

def hangs(*args):
    begun.set()
    threading.Event().wait()

Replica.step_part = hangs
run.train(4)
assert begun.wait(60)
print("end of the script")
"""


def test_an_exit_waits_for_a_hanging_update_no_longer_than_its_limit(tmp_path: Path) -> None:
    """The limit is 60 s, here half a second; the script ends with the status of success."""
    code, out, err = run([sys.executable, "-c", HANGS], tmp_path)
    assert code == 0, err
    assert out == "end of the script\n"
    assert "the optimizer thread did not finish its step within 0.5 s" in err


ENDS_AT_ONCE = """
import time
import torch
from accel_scaler.optimizer_step.replica import Replica
from fault_run import Run

torch.set_num_threads(1)
run = Run("overlap").train(3)
run.optimizer.synchronize()
step_part, memory = Replica.step_part, run.layers[0].bias.detach()
before = memory.clone()

def slowly(*args):
    time.sleep(0.3)
    step_part(*args)
    print("moved:", not torch.equal(memory, before), flush=True)

Replica.step_part = slowly
run.train(4)
print("end of the script", flush=True)
"""


def test_an_exit_right_after_a_step_finishes_its_update(tmp_path: Path) -> None:
    code, out, err = run([sys.executable, "-c", ENDS_AT_ONCE], tmp_path)
    assert (code, out.splitlines()) == (0, ["end of the script", "moved: True"]), err


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    mine = main(where)
    if mine is not None and CASES[mine[0]] == 1:
        meet_signal(mine[0], where)
    elif mine is not None:
        train_rank(*mine, where)
