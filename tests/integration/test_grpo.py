"""TRL's GRPOTrainer on float16 weights in every step mode: the sampler draws with the newest
parameters, a run is that of a plain torch loop with masters, a skip moves nothing.

The worker updates nothing that nobody waits for (``lazy``).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.0", reason="an older GRPOTrainer has other arguments")

from async_support import assert_same, lazy, values
from grpo_support import Sampler, llama, make
from reference_trainer import ReferenceOptimizer, ReferenceScaler, Verdicts, momentum
from references import GROWTH_INTERVAL, INIT_SCALE
from support import stock_fp16_on_cpu
from torch import Tensor
from transformers import TrainerCallback

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync offload": {"offload": "cpu"},
    "overlap": {"step_mode": "overlap"},
    "overlap offload": {"step_mode": "overlap", "offload": "cpu"},
    "delayed": {"step_mode": "delayed", "delay_compensation": "preview"},
    "delayed offload": {
        "step_mode": "delayed",
        "delay_compensation": "preview",
        "offload": "cpu",
    },
}


@contextmanager
def attached(trainer: Any, mode: str) -> Iterator[Any]:
    config = ScalerConfig(
        **MODES[mode], init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL, optimizer_threads=1
    )
    with nullcontext() if mode == "sync" else lazy():
        try:
            yield attach(trainer, config)
        finally:
            detach(trainer)


def masters(trainer: Any) -> list[Tensor]:
    """The optimizer's float32 weights."""
    state = trainer.optimizer.state_dict()["state"]
    return [state[i]["master"].clone() for i in range(len(state))]


def outcome(trainer: Any, sampler: Sampler) -> dict[str, Any]:
    state = trainer.optimizer.state_dict()["state"]
    return {
        "drawn": sampler.drawn,
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "momentum": [state[i]["momentum_buffer"].clone() for i in range(len(state))],
        "masters": masters(trainer),
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
        "rates": [e["learning_rate"] for e in trainer.state.log_history if "loss" in e],
    }


# --- beside a plain loop ------------------------------------------------------------------------


def run_plain(path: Path, mode: str, steps: int, overflows: Iterable[int]) -> dict[str, Any]:
    """A stock GRPOTrainer around it. Late updates are shown to the training forward alone."""
    model = llama(overflows=overflows)
    compensation = MODES[mode].get("delay_compensation")
    late = {"prompt": 0, "compensation": compensation} if compensation else {}
    optimizer = ReferenceOptimizer(model.parameters(), **late)
    trainer, sampler = make(path, model, optimizer, max_steps=steps, max_grad_norm=0.0)
    trainer.add_callback(Verdicts())
    reference = optimizer.reference

    def exact(generate: Any) -> Any:
        shown = values(model)
        reference.publish()
        result = generate()
        with torch.no_grad():
            for p, value in zip(model.parameters(), shown, strict=True):
                p.copy_(value)
        return result

    sampler.around = exact
    stock_fp16_on_cpu(trainer.accelerator).scaler = ReferenceScaler(reference)
    # The plain loop clips. With no limit Trainers do it all the same, and the norm of scaled
    # float16 gradients may be inf, by which they make them nan.
    trainer.accelerator.clip_grad_norm_ = lambda *_: torch.zeros(())
    trainer.train()
    reference.publish()
    return {
        "drawn": sampler.drawn,
        "weights": values(model),
        "momentum": [entry["momentum_buffer"] for entry in reference.state()],
        "masters": [m.detach() for m in reference.masters],
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
        "rates": [e["learning_rate"] for e in trainer.state.log_history if "loss" in e],
    }


@pytest.mark.parametrize(
    ("mode", "steps"),
    [("overlap offload", 100), ("delayed", 100), ("sync", 20), ("overlap", 20)],
)
def test_a_run_is_that_of_a_plain_loop_with_masters(tmp_path: Path, mode: str, steps: int) -> None:
    """What is drawn, losses, rates, weights, masters and momentum, bit for bit."""
    overflows = (3, 11, 12, 60)
    reference = run_plain(tmp_path / "plain", mode, steps, overflows)
    trainer, sampler = make(tmp_path / "ours", llama(overflows=overflows), max_steps=steps)
    trainer.optimizer = momentum(trainer.model.parameters())
    with attached(trainer, mode):
        trainer.train()
        ours = outcome(trainer, sampler)
    assert_same(ours, reference)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
    assert len(reference["losses"]) == steps
    assert reference["rates"][3] == reference["rates"][4] != reference["rates"][5]
    drawn = reference["drawn"]
    assert drawn[-1] != drawn[0]


# --- the sampler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_sampler_draws_with_the_newest(tmp_path: Path, mode: str) -> None:
    """In ``delayed``, too, where the training forward is shown something else."""
    trainer, sampler = make(tmp_path, llama())
    trainer.optimizer = momentum(trainer.model.parameters())
    newest: list[list[Tensor]] = []

    def note(generate: Any) -> Any:
        result = generate()
        if newest or trainer.state.global_step:  # masters are made by the first step
            newest.append([m.half() for m in masters(trainer)])
        else:
            newest.append(values(trainer.model))
        return result

    sampler.around = note
    with attached(trainer, mode):
        trainer.train()
    assert len(newest) == 8
    assert_same(sampler.weights, newest)
    assert not torch.equal(newest[-1][0], newest[0][0])


class Sync(TrainerCallback):
    """Between steps, what TRL does to its live model: reads ``.data`` as it sends weights to vLLM,
    mixes them into a reference model, casts to float16 for generation and the head back."""

    def __init__(self, casts: bool) -> None:
        self.casts = casts
        self.sent: list[dict[str, Tensor]] = []
        self.reference: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        if self.reference is None:
            self.reference = copy.deepcopy(model)
        for mixed, p in zip(self.reference.parameters(), model.parameters(), strict=True):
            mixed.data.mul_(0.4).add_(p.data, alpha=0.6)
        self.sent.append({name: p.data.clone() for name, p in model.named_parameters()})
        if self.casts and state.global_step % 2:
            model.to(torch.float16)
            model.lm_head.to(torch.float32)


@pytest.mark.parametrize("casts", [False, True])
def test_what_trl_does_to_its_model_between_steps_is_as_in_sync(
    tmp_path: Path, casts: bool
) -> None:
    """With ``casts`` the head is float32, as by ``cast_lm_head_to_fp32``, and rounded in the live
    model: those who see it see that, in a plain loop too."""
    found = {}
    for mode in MODES:
        model = llama()
        if casts:
            model.lm_head.float()
        trainer, sampler = make(tmp_path / mode, model)
        trainer.optimizer = momentum(trainer.model.parameters())
        trainer.add_callback(callback := Sync(casts))
        with attached(trainer, mode):
            trainer.train()
            state = trainer.optimizer.state_dict()["state"]
            found[mode] = {
                "sent": callback.sent,
                "mixed": values(callback.reference),
                "drawn": sampler.drawn,
                "weights": [p.detach().clone() for p in model.parameters()],
                "momentum": [state[i]["momentum_buffer"].clone() for i in range(len(state))],
            }
        assert (model.lm_head.weight.dtype is torch.float32) is casts
    for mode in ("sync offload", "overlap", "overlap offload"):
        assert_same(found[mode], found["sync"], mode)
    assert_same(found["delayed offload"], found["delayed"], "delayed offload")
    # One step is like any other there, so its numbers are not those of sync; what is sent is exact.
    sent, weights = found["delayed"]["sent"], found["delayed"]["weights"]
    if not casts:
        assert_same(list(sent[-1].values()), weights)
    assert not torch.equal(sent[-1]["lm_head.weight"], sent[0]["lm_head.weight"])


def test_a_reference_model_is_mixed_with_the_newest(tmp_path: Path) -> None:
    """TRL's own ``sync_ref_model``, the reference in float16 as the model is."""
    llama().save_pretrained(tmp_path / "model")
    found = {}
    for mode in ("sync", "overlap", "delayed"):
        model = type(llama()).from_pretrained(tmp_path / "model", dtype=torch.float16)
        settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
        trainer, sampler = make(
            tmp_path / mode, model, max_steps=4, ref_model_mixup_alpha=1.0, **settings
        )
        trainer.optimizer = momentum(trainer.model.parameters())
        with attached(trainer, mode):
            trainer.train()
            newest = [m.half() for m in masters(trainer)]
        reference: Any = trainer.ref_model
        assert_same(values(reference), newest, mode)
        found[mode] = [sampler.drawn, newest]
    assert_same(found["overlap"], found["sync"])


# --- a skip ---------------------------------------------------------------------------------------


class Around(TrainerCallback):
    """All that a step may move, before and after each."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.moved = trainer, list[bool]()
        self.before: Any = None

    def read(self) -> Any:
        trainer = self.trainer
        model, optimizer = trainer.model, trainer.optimizer
        prompt = torch.tensor([[2, 3, 4]])
        with torch.no_grad():
            logits = model(prompt).logits.clone()
        return copy.deepcopy(
            {
                "sampler": logits,
                "parameters": [p.detach() for p in model.parameters()],
                "state": optimizer.state_dict()["state"],
                "rate": optimizer.param_groups[0]["lr"],
                "schedule": trainer.lr_scheduler.state_dict()["last_epoch"],
            }
        )

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.before = self.read()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        try:
            assert_same(without_previews(self.read()), without_previews(self.before))
        except AssertionError:
            self.moved.append(True)
        else:
            self.moved.append(False)


def without_previews(seen: dict[str, Any]) -> dict[str, Any]:
    """What the next training forward is shown is no part of the training's state."""
    state = {
        index: {key: value for key, value in entry.items() if key != "preview"}
        for index, entry in seen["state"].items()
    }
    return {**seen, "state": state}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_skip_at_any_step_moves_nothing(tmp_path: Path, mode: str, optimizer: str) -> None:
    """The first, some in a row, the last: parameters, masters, momentum, rate, what is sampled."""
    skipped, steps = {0, 2, 3, 6, 9}, 10
    # A rate of its own that no skip before the first step can make zero.
    settings = {"max_steps": steps, "lr_scheduler_type": "polynomial"}
    trainer, _ = make(tmp_path, llama(overflows=skipped), **settings)
    make_optimizer = momentum if optimizer == "sgd" else partial(torch.optim.AdamW, lr=1e-2)
    trainer.optimizer = make_optimizer(trainer.model.parameters())
    trainer.add_callback(around := Around(trainer))
    with attached(trainer, mode):
        trainer.train()
        records = trainer.accelerator.scaler_history.records
    assert {n for n, record in enumerate(records) if record.skipped} == skipped
    assert around.moved == [n not in skipped for n in range(steps)]


# --- where nothing can wait -----------------------------------------------------------------------


class SendOnAThread(TrainerCallback):
    """As TRL's asynchronous trainer does after each step."""

    def __init__(self) -> None:
        self.sent: list[list[Tensor]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        def send() -> None:
            self.sent.append([p.detach().clone() for p in kwargs["model"].parameters()])

        sender = threading.Thread(target=send)
        sender.start()
        sender.join()


class Merge(TrainerCallback):
    """Sends the base's weights with the adapter in them, as TRL does for vLLM: with autograd on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.sent, self.exact = trainer, list[Tensor](), list[Tensor]()

    def merged(self, model: Any) -> Tensor:
        layer = model.base_model.model.model.layers[0].self_attn.v_proj
        model.merge_adapter()
        weight: Tensor = layer.base_layer.weight.data.clone()
        model.unmerge_adapter()
        return weight

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.sent.append(self.merged(kwargs["model"]))
        self.trainer.optimizer.synchronize()
        self.exact.append(self.merged(kwargs["model"]))


@pytest.mark.parametrize("mode", ["overlap", "delayed", "delayed offload"])
def test_an_adapter_is_merged_as_it_is(tmp_path: Path, mode: str) -> None:
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["v_proj"], "lora_alpha": 64, "init_lora_weights": False}
    base = llama(torch.float32)  # float16 would round what an unmerged base has left
    trainer, _ = make(tmp_path, peft.get_peft_model(base, peft.LoraConfig(**settings)))
    model: Any = trainer.model
    # Of AdamW a preview is a guess; of SGD it is the update, but for rounding.
    trainer.optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.01)
    trainer.add_callback(callback := Merge(trainer))
    with attached(trainer, mode):
        trainer.train()
    assert len(callback.sent) == 8
    for sent, exact in zip(callback.sent, callback.exact, strict=True):
        assert torch.allclose(sent, exact, rtol=0.0, atol=1e-6)
    assert (callback.sent[-1] - callback.sent[0]).abs().max() > 1e-3


class Note(TrainerCallback):
    """The newest parameters, before each step but the first."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.newest = trainer, list[list[Tensor]]()

    def on_step_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.newest.append([m.half() for m in masters(self.trainer)])


@pytest.mark.parametrize("kind", ["asynchronous", "shards"])
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_what_is_sent_where_nothing_can_wait_is_the_newest(
    tmp_path: Path, mode: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run is what it is without: in ``delayed`` the next forward is shown the preview."""
    if kind == "shards":  # the models of FSDP2, of which a CPU's Accelerate makes none
        monkeypatch.setattr("accel_scaler.integrations.trainer.is_sharded", lambda _: True)
    found = []
    for sends in (True, False):
        trainer, sampler = make(tmp_path / str(sends), llama())
        trainer.optimizer = momentum(trainer.model.parameters())
        callback, note = SendOnAThread(), Note(trainer)
        if sends:
            if kind == "shards":
                trainer.args.sync_ref_model = True
            else:
                trainer.weight_transfer = object()  # by which AsyncGRPOTrainer is known
            trainer.add_callback(callback)
            trainer.add_callback(note)
        with attached(trainer, mode):
            trainer.train()
            found.append(outcome(trainer, sampler))
        if sends:
            assert_same(callback.sent[:-1], note.newest)
            assert len(note.newest) == 7
    assert_same(found[0], found[1])


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_continuous_batching_draws_with_the_newest(tmp_path: Path, mode: str) -> None:
    """transformers generates on a thread of its own then, after TRL has cast the live model."""
    # Else its cache takes most of the memory that is free.
    small = {"num_blocks": 64, "max_batch_tokens": 64}
    trainer, _ = make(
        tmp_path,
        llama(),
        max_steps=3,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=small,
    )
    trainer.optimizer = momentum(trainer.model.parameters())
    model: Any = trainer.model
    generate, pairs = model.generate_batch, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        seen = values(model)
        if trainer.state.global_step:
            pairs.append((seen, [m.half() for m in masters(trainer)]))
        return result

    model.generate_batch = watched
    with attached(trainer, mode):
        trainer.train()
    assert len(pairs) == 2
    for seen, newest in pairs:
        assert_same(seen, newest)
