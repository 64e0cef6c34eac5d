"""Checkpoints, sources and launches: nothing that comes from a file or a user is executed.

``test_hostile_files.py`` has config and telemetry files. Takes about 15 s, most of it a launch.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from places import ROOT
from torch.optim.lr_scheduler import LambdaLR

from accel_scaler import AsyncOptimizer, ConfigError, GradScaler, ScalerConfig, attach, detach

SOURCES = sorted(
    path
    for name in ("accel_scaler", "recipes", "benchmarks")
    for path in (ROOT / name).rglob("*.py")
)
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
UNSAFE = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
UNSAFE |= {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader"}
UNSAFE |= {"yaml.UnsafeLoader", "yaml.FullLoader", "pandas.read_pickle"}
STARTS = {"run", "call", "check_call", "check_output", "Popen"}

MODES = [
    {"step_mode": "sync"},
    {"step_mode": "overlap"},
    {"step_mode": "delayed", "offload": "cpu"},
]

pytestmark = pytest.mark.usefixtures("one_thread")


# What the sources may not do.


def faults(source: str) -> list[str]:
    """What in a source could run something out of a file or a text, in words."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            found.append(str(node.module))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            found += call_faults(node)
    return found


def call_faults(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    found = [name] * (name in RUNS_TEXT)
    if given.get("shell", "False") != "False":
        found.append(f"{name}(shell=...)")
    if name == "torch.load" and given.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if given.get("allow_pickle", "False") != "False":
        found.append(f"{name}(allow_pickle=...)")
    starts = name.startswith("subprocess.") and name.split(".")[1] in STARTS
    texts = (ast.Constant, ast.JoinedStr, ast.BinOp)
    if starts and call.args and isinstance(call.args[0], texts):
        found.append(f"{name} with a text for a command line")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_a_file_or_a_text_says(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "yaml.load(text, yaml.SafeLoader)",
        "loader = yaml.UnsafeLoader",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run('ls ' + name)",
        "subprocess.run(f'ls {name}')",
        "subprocess.Popen(argv, shell=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_search_sees_what_it_looks_for(source: str) -> None:
    assert faults(f"def f():\n    {source}\n")


# Checkpoints.


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)).to(dtype)


def loads_safely(state: Any, path: Path) -> Any:
    """``state`` after a file that is read as a checkpoint should be."""
    torch.save(state, path)
    before = torch.serialization.get_safe_globals()
    assert not [each for each in before if each.__module__.startswith("accel_scaler")]  # type: ignore[union-attr]
    torch.serialization.clear_safe_globals()  # torch has some of its own
    try:
        loaded = torch.load(path, weights_only=True)
    finally:
        torch.serialization.add_safe_globals(before)
    assert_same(loaded, state)
    return loaded


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("used", [False, True])
def test_a_scalers_state_is_plain_numbers(used: bool, tmp_path: Path) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2, max_consecutive_skips=9, min_scale=1.0)
    if used:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(model(torch.full((2, 4), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = loads_safely(scaler.state_dict(), tmp_path / "scaler.pt")
    fresh = GradScaler("cpu", hysteresis=2, max_consecutive_skips=9, min_scale=1.0)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("mode", "dtype"),
    list(zip(MODES, [torch.float32, torch.float16, torch.float16], strict=True)),
)
def test_an_async_optimizers_state_loads_without_pickled_code(
    mode: dict[str, str], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also straight after a step, whose update may still run."""

    def make() -> tuple[torch.nn.Module, GradScaler, AsyncOptimizer]:
        model, scaler = model_of(dtype), GradScaler("cpu", init_scale=4.0)
        settings = {"mode": mode["step_mode"], "offload": mode.get("offload", "none")}
        inner = torch.optim.AdamW(model.parameters(), 0.1)
        return model, scaler, AsyncOptimizer(inner, model, scaler=scaler, **settings)  # type: ignore[arg-type]

    model, scaler, optimizer = make()
    with optimizer:
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 4, dtype=dtype)).sum()).backward()
            optimizer.step()
        state = loads_safely(optimizer.state_dict(), tmp_path / "optimizer.pt")
        assert state["state"]
        other, _, fresh = make()
        with fresh:
            other.load_state_dict(model.state_dict())
            fresh.load_state_dict(state)
            assert_same(fresh.state_dict(), optimizer.state_dict())


class Run:
    """An attached loop of a few windows, with everything that ``save_state`` writes."""

    def __init__(self, mode: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        config = ScalerConfig(init_scale=4.0, **mode)
        self.accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        model = model_of(dtype)
        inner = torch.optim.AdamW(model.parameters(), 0.1)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, inner, LambdaLR(inner, lambda step: 1.0)
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        detach(self.accelerator)

    def train(self, windows: int = 2) -> None:
        for _ in range(windows):
            self.accelerator.backward(self.model(torch.ones(2, 4)).float().sum())
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_saved_state_loads_without_pickled_code(mode: dict[str, str], tmp_path: Path) -> None:
    with Run(mode, torch.float16) as run:
        run.train()
        run.accelerator.save_state(str(tmp_path), safe_serialization=False)
        names = {path.name for path in tmp_path.iterdir()}
        assert names >= {"pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt"}
        assert not [name for name in names if name.startswith("custom_checkpoint")]
        assert run.accelerator._custom_objects == [], "Accelerate unpickles these as they are"
        for name in ("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt"):
            loads_safely(torch.load(tmp_path / name, weights_only=True), tmp_path / "again.pt")
        run.accelerator.load_state(str(tmp_path))
        run.train(1)


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("raw", [False, True], ids=["torch.save", "pickle"])
@pytest.mark.parametrize(
    "name",
    ["optimizer.bin", "scaler.pt", "scheduler.bin", "pytorch_model.bin", "random_states_0.pkl"],
)
def test_a_hostile_checkpoint_does_not_run(name: str, raw: bool, tmp_path: Path) -> None:
    folder, went_off = tmp_path / "saved", tmp_path / "boom"
    with Run({"step_mode": "overlap"}) as run:
        run.train()
        run.accelerator.save_state(str(folder), safe_serialization=False)
        if raw:
            (folder / name).write_bytes(pickle.dumps({"scale": Bomb(went_off)}, 2))
        else:
            torch.save({"scale": Bomb(went_off)}, folder / name)
        if name.endswith(".pkl") and not raw:  # Accelerate goes on without its random numbers
            run.accelerator.load_state(str(folder))
        else:
            with pytest.raises(
                (pickle.UnpicklingError, ConfigError), match=r"weights_only|cut off"
            ):
                run.accelerator.load_state(str(folder))
        assert not went_off.exists()
        run.train(1)
    if raw:
        pickle.loads((folder / name).read_bytes())
    else:
        torch.load(folder / name, weights_only=False)
    assert went_off.exists(), "a bomb that never goes off proves nothing"


def test_a_users_own_registered_object_is_loaded_by_accelerate_as_it_likes(tmp_path: Path) -> None:
    """Accelerate unpickles those without a check. The README says so; ours are not among them."""

    class Mine:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: object) -> None: ...

    folder, went_off = tmp_path / "saved", tmp_path / "boom"
    with Run({}) as run:
        run.accelerator.register_for_checkpointing(Mine())
        run.train()
        run.accelerator.save_state(str(folder))
        torch.save(Bomb(went_off), folder / "custom_checkpoint_0.pkl")
        run.accelerator.load_state(str(folder))
    assert went_off.exists(), "Accelerate has become safe: take the sentence out of the README"


# Launching.


ARGUMENTS = [
    "two words",
    "'single'",
    '"double"',
    "; touch boom",
    "$(touch boom)",
    "`touch boom`",
    "| tee boom",
    "&& touch boom",
    "a\nb",
    "tab\there",
    "back\\slash",
    "*",
    "~",
    "%PATH%",
    "{rank}",
    "",
    "-",
    "--",
    "ünï \u202e",
]


@pytest.mark.process
def test_arguments_reach_the_script_as_they_were_given(tmp_path: Path) -> None:
    script = tmp_path / "a script; $(touch boom).py"
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv, os.environ['ACCEL_SCALER_TELEMETRY'], os.listdir('.')]))\n"
    )
    telemetry = "run $(touch boom) `touch boom`;\n'\".jsonl"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL", "PYTHONPATH"))}
    flags = ["--cpu", "--mixed_precision", "fp16", "--num_processes", "1", "--num_machines", "1"]
    argv = [sys.executable, "-m", "accel_scaler", "launch", *flags, "--telemetry", telemetry]
    done = subprocess.run(
        [*argv, str(script), *ARGUMENTS],
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    argv, path, files = json.loads(done.stdout.splitlines()[-1])
    assert argv == [str(script), *ARGUMENTS]
    assert path == telemetry
    assert files == [script.name]
