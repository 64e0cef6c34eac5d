"""docs/my-run-says.md: stock prints the text of each row, or does what it says; the cure cures."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from attached import inner_dtype, prepared
from boundary_support import models, one, ours
from places import ROOT
from references import no_bfloat16_in_torchs_kernel
from support import LR, Linear, Loud, reset, same, stock, stock_fp16_on_cpu, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from trainer_support import CONFIG, as_stock, make, train
from versions import release

from accel_scaler import ScalerConfig, attach
from accel_scaler.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (ROOT / "docs/my-run-says.md").read_text("utf-8")
SECTIONS = [re.findall(r"^\| .+", part, re.MULTILINE)[1:] for part in PAGE.split("\n## ")[1:]]
ROWS, SILENT = [row for rows in SECTIONS for row in rows], SECTIONS[-1]
INF = float("inf")
SAID = (RuntimeError, ValueError, AssertionError, AttributeError, Warning)


def at_1024(**settings: Any) -> Any:
    return ours(ScalerConfig(init_scale=1024.0, **settings))


def with_low_weights(accelerator: Any, dtype: torch.dtype) -> float:
    model = Linear().to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    accelerator.backward(model(1.0))
    optimizer.step()
    return model.moved


def fp16_weights(is_ours: bool, path: Path) -> None:
    moved = with_low_weights(at_1024() if is_ours else stock(), torch.float16)
    assert moved == 1.0


def no_inf_checks(is_ours: bool, path: Path) -> None:
    accelerator = at_1024() if is_ours else stock()
    both, optimizers = models(accelerator, 2)
    accelerator.backward(both[0](1.0))
    for optimizer in optimizers:
        optimizer.step()
    assert [each.moved for each in both] == [1.0, 0.0]


def unscale_twice(is_ours: bool, path: Path) -> None:
    accelerator = at_1024() if is_ours else stock()
    model, optimizer = one(accelerator)
    for is_dropped in (True, False):
        optimizer.zero_grad()
        accelerator.backward(model(1.0))
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        if not is_dropped:
            optimizer.step()
    assert model.moved == 1.0


def bf16_weights(is_ours: bool, path: Path) -> None:
    with no_bfloat16_in_torchs_kernel():
        moved = with_low_weights(at_1024() if is_ours else stock(), torch.bfloat16)
    assert moved == 1.0


def overflow_at_every_scale(is_ours: bool, path: Path) -> None:
    accelerator = ours(ScalerConfig(heal=True)) if is_ours else stock()
    net = nn.Sequential(Loud(8, 8), nn.Linear(8, 64), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    before = weights(net)
    for _ in range(40):
        accelerator.backward(model(torch.randn(4, 8)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    scale = accelerator.scaler.get_scale()
    assert torch.equal(before, weights(net)) is not is_ours
    assert scale == 2.0**16 if is_ours else scale == 2.0**-24
    if is_ours:
        assert accelerator.scaler_history.healed == ("0",)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x)))
        return out


def norm_of_another_dtype(is_ours: bool, path: Path) -> None:
    """The numbers that it has with weights in float32, rounded as they were loaded."""
    for precision, dtype in (("bf16", torch.float16), ("fp16", torch.bfloat16)):
        reset()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        if is_ours:
            attach(accelerator, fp32_modules=["*norm*"])
        elif precision == "fp16":
            stock_fp16_on_cpu(accelerator)
        net, x = Normed().to(dtype), torch.randn(4, 8)
        with torch.autocast("cpu", torch.bfloat16 if precision == "bf16" else torch.float16):
            hidden = net.up(x).float()
        float32 = copy.deepcopy(net).float()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        out = model(x)
        with torch.autocast("cpu", torch.bfloat16 if precision == "bf16" else torch.float16):
            assert torch.equal(out, float32.down(float32.norm(hidden)).float())
        before = weights(net)
        accelerator.backward(out.square().mean() * 1e-3)
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert not torch.equal(before, weights(net))


def scaler_in_use(is_ours: bool, path: Path) -> None:
    """What ``load_state`` does under FSDP2; whole runs are in test_fsdp2.py."""
    accelerator = at_1024() if is_ours else stock()
    model, optimizer = one(accelerator)
    accelerator.backward(model(1.0))
    optimizer.step()
    saved = accelerator.scaler.state_dict() | {"scale": 2.0}
    accelerator.scaler.load_state_dict(saved)
    accelerator.scaler._lazy_init_scale_growth_tracker(accelerator.device)
    assert accelerator.scaler.state_dict() == saved


def no_scaler_to_load(is_ours: bool, path: Path) -> None:
    """The weights go on from those of the fp16 run, and each step trains."""
    trainer, _ = make(path, (), **PLAIN | {"save_strategy": "steps", "save_steps": 2})
    train(attach(trainer, CONFIG))
    checkpoint = path / "checkpoint-2"
    reset()
    if is_ours:
        (checkpoint / "scaler.pt").unlink()
    trainer, recorder = make(path, (), fp16=False, bf16=True, **PLAIN)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert recorder.skipped == [False, False]
    assert trainer.state.global_step == 4


def config_among_handlers(is_ours: bool, path: Path) -> None:
    config = ScalerConfig(init_scale=2.0)
    plain: Any = {"cpu": True, "mixed_precision": "fp16"}
    if is_ours:
        accelerator = attach(Accelerator(**plain), config)
    else:
        accelerator = Accelerator(**plain, kwargs_handlers=[config])
    assert accelerator.scaler.get_scale() == 2.0


def section_in_the_file(is_ours: bool, path: Path) -> None:
    file, script = path / "this.yaml", path / "train.py"
    file.write_text("distributed_type: 'NO'\nuse_cpu: true\naccel_scaler: {heal: true}\n", "utf-8")
    script.touch()
    if is_ours:
        assert main(["launch", "--dry_run", "--config_file", str(file), str(script)]) == 0
    else:
        load_config_from_file(str(file))


def logged(trainer: Any) -> list[dict[str, Any]]:
    steps = [entry for entry in train(trainer).state.log_history if "grad_norm" in entry]
    reset()
    return steps


PLAIN: Any = {"gradient_accumulation_steps": 1, "max_steps": 4}


def norms_in_the_first_steps(is_ours: bool, path: Path) -> None:
    too_large = ScalerConfig(init_scale=2.0**24)
    if is_ours:
        trainer, _ = make(path, (), **PLAIN)
        attach(trainer, init_scale=1024.0)
        found = logged(trainer)
        assert all(0 < entry["grad_norm"] < 100 for entry in found)
        assert found[-1]["scaler_skips"] == 0
        return
    trainer, _ = make(path, (), **PLAIN)
    stock_fp16_on_cpu(trainer.accelerator)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=too_large.init_scale)
    found = logged(trainer)
    trainer, recorder = make(path, (0,), **PLAIN)
    found += logged(as_stock(trainer))
    assert recorder.scales == [CONFIG.init_scale / 2] * 3 + [CONFIG.init_scale]
    raise RuntimeError(str(found))


def loss_of_zero(is_ours: bool, path: Path) -> None:
    for precision in ("bf16", "no"):
        trainer, _ = make(path, (1,), fp16=False, bf16=precision == "bf16", **PLAIN)
        if is_ours:
            found = logged(attach(trainer))
            assert [entry["grad_norm"] == INF for entry in found] == [False, True, False, False]
            assert all(entry["loss"] > 1 for entry in found)
            continue
        *_, before, last = logged(trainer)
        assert "'loss': 0.0, 'grad_norm': nan" in str(before)
    if not is_ours:
        raise RuntimeError(str(last))


def schedule_before_the_step(is_ours: bool, path: Path) -> None:
    for cure in ("prepare", "ask") if is_ours else ("",):
        accelerator = at_1024() if is_ours else stock()
        net = Linear()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=LR)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer = accelerator.prepare(net, optimizer)
        schedule = accelerator.prepare(schedule) if cure == "prepare" else schedule
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for gradient in (INF, 1.0):
                accelerator.backward(model(gradient))
                optimizer.step()
                if cure != "ask" or not optimizer.step_was_skipped:
                    schedule.step()
                optimizer.zero_grad()
        assert (net.moved, optimizer.param_groups[0]["lr"]) == (1.0, LR / 2)
        reset()


def schedule_and_average(is_ours: bool, path: Path) -> None:
    accelerator = at_1024() if is_ours else stock()
    net = Linear()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    average = AveragedModel(net)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    accelerator.backward(model(INF))
    optimizer.step()
    schedule.step()
    if not optimizer.step_was_skipped:
        average.update_parameters(net)
    assert net.moved == 0
    moved = (optimizer.param_groups[0]["lr"], int(average.n_averaged))
    assert moved == ((LR, 0) if is_ours else (LR / 2, 1))


def resumed(is_ours: bool, path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        reset()
        accelerator = ours() if is_ours else stock()
        return accelerator, *one(accelerator)

    accelerator, model, optimizer = start()
    for gradient in (INF, INF, 1.0):
        accelerator.backward(model(gradient))
        optimizer.step()
        optimizer.zero_grad()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if is_ours:
        parts["scaler"] = accelerator.scaler.state_dict()
        accelerator.save_state(str(path))
    torch.save(parts, path / "own.pt")
    for own in (True, False) if is_ours else (True,):
        accelerator, model, optimizer = start()
        saved = torch.load(path / "own.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if "scaler" in saved:
            accelerator.scaler.load_state_dict(saved["scaler"])
        if not own:
            accelerator.load_state(str(path))
        assert accelerator.scaler.get_scale() == 2.0 ** (14 if is_ours else 16)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4, bias=False)
        self.b = nn.Linear(4, 8, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def lora_after_skips(is_ours: bool, path: Path) -> None:
    accelerator = ours(ScalerConfig(min_scale=1.0)) if is_ours else stock()
    net = Lora()
    trained = [p for p in net.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(trained, lr=0.01))
    skipped = []
    for step in range(50):
        loss = model(torch.randn(4, 8)).float().square().mean()
        accelerator.backward(loss * (INF if step < 40 else 1e-2))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [True] * 40 + [False] * 10
    assert (net.b.weight.abs().max() > 0.05) if is_ours else not net.b.weight.any()


def muon(is_ours: bool, path: Path) -> None:
    """Stock: what DeepSpeed's did, momentum from a gradient that is not checked yet."""
    if not is_ours:
        w, momentum, scale = torch.zeros(4, 4), torch.zeros(4, 4), 65536.0
        for step in range(40):
            grad = torch.full((4, 4), INF if step == 0 else scale)  # of a loss at this scale
            grad.lerp_(momentum.lerp_(grad, 0.05), 0.95)
            if grad.isfinite().all():
                w -= grad / scale
            else:
                scale /= 2
        assert (scale, bool(momentum.isnan().all()), bool(w.any())) == (2.0**-24, True, False)
        return
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def run(first: tuple[float, ...], mode: str) -> Any:
        reset()
        accelerator = at_1024(step_mode=mode)
        net = nn.Linear(8, 8, bias=False)
        model, optimizer = accelerator.prepare(net, torch.optim.Muon(net.parameters(), lr=0.02))
        for factor in (*first, 1.0, 1.0, 1.0):
            accelerator.backward(model(torch.eye(8)).float().square().mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict(), optimizer.state_dict()["state"][0]["momentum_buffer"]

    for mode in ("sync", "overlap"):
        assert same(run((INF,), mode), run((), mode))


def fp16_on_a_cpu(is_ours: bool, path: Path) -> None:
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    if is_ours:
        attach(accelerator)
    model, _ = prepared(accelerator)
    assert inner_dtype(model) is (torch.float16 if is_ours else torch.float32)
    assert (accelerator.scaler is None) is not is_ours


RUNS: list[Callable[..., None] | None] = [
    *(fp16_weights, no_inf_checks, unscale_twice, bf16_weights, overflow_at_every_scale),
    norm_of_another_dtype,
    None,  # a Mac
    *(scaler_in_use, no_scaler_to_load, config_among_handlers, section_in_the_file),
    *(norms_in_the_first_steps, loss_of_zero, schedule_before_the_step),
    *(schedule_and_average, resumed, lora_after_skips, muon, fp16_on_a_cpu),
]
"""A run for each row, in the page's order. Of stock it raises what is printed, or asserts what is
not; with the cure it passes."""


@pytest.mark.parametrize(
    ("row", "run"),
    zip(ROWS, RUNS, strict=True),
    ids=[getattr(run, "__name__", "no_mac") for run in RUNS],
)
def test_stock_says_it_and_the_cure_cures(
    row: str, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if run is None:
        assert "*not run here*" in row
        pytest.skip("not run here")
    if row in SILENT or "*not run here*: DeepSpeed" in row:
        run(False, tmp_path)
    else:
        with pytest.raises(SAID) as caught:
            run(False, tmp_path)
        texts = [a or b for a, b in re.findall(r"``(.+?)``|`(.+?)`", row.split(" | ")[0])]
        if release("transformers") < (5, 0):
            texts = [text for text in texts if ": '" not in text]
        said = str(caught.value) + capsys.readouterr().out
        assert texts
        assert [text for text in texts if text not in said] == []
    reset()
    run(True, tmp_path)
