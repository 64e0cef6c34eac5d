"""bfloat16 parameters under fp16 autocast: attached, saved, resumed, evaluated, compiled."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from references import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    NEVER_STALE,
    OPTIMIZERS,
    assert_same_run,
    loss_of,
    network,
    run_reference,
    same,
    saved_of,
)
from safetensors.torch import load_file
from support import reset
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from accel_scaler import ScalerConfig, UnsupportedError, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

BRAIN = torch.bfloat16
WAYS = [
    *itertools.product(("sync", "overlap", "delayed"), ("none", "cpu"), ("auto",)),
    ("sync", "none", "none"),
    ("overlap", "none", "none"),
]


def brain() -> nn.Module:
    return network(BRAIN)


def attached(mode: str = "sync", offload: str = "none", wish: str = "auto", **settings: Any) -> Any:
    reset()
    return attach(
        Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=1),
        ScalerConfig(
            step_mode=mode,  # type: ignore[arg-type]
            offload=offload,  # type: ignore[arg-type]
            master_weights=wish,  # type: ignore[arg-type]
            growth_interval=GROWTH_INTERVAL,
            delay_compensation="none",
            **{"init_scale": INIT_SCALE, **settings},
        ),
    )


def train(
    accelerator: Any, model: Any, optimizer: Any, steps: range, micro: int = 1
) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {"losses": [], "scales": []}
    for step in steps:
        for number in range(step * micro, (step + 1) * micro):
            accelerator.gradient_state._set_sync_gradients(number == (step + 1) * micro - 1)
            loss = loss_of(model, number, step in (0, 5))
            accelerator.backward(loss / micro)
            seen["losses"].append(str(float(loss.detach())))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                optimizer.zero_grad()
        seen["scales"].append(accelerator.scaler.get_scale())
    return seen


@pytest.fixture
def kernel_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch's check takes none."""
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def checked(grads: list[Tensor], *rest: Any) -> None:
        assert all(grad.dtype is not BRAIN for grad in grads)
        kernel(grads, *rest)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", checked)


@pytest.mark.usefixtures("kernel_without_bfloat16")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("mode", "offload", "wish"), [way for way in WAYS if way[2] == "auto"])
def test_attached_they_train_as_a_loop_with_masters(
    mode: str, offload: str, wish: str, kind: str, micro: int
) -> None:
    accelerator = attached(mode, offload, wish)
    net = brain()
    model, optimizer = accelerator.prepare(net, OPTIMIZERS[kind](net.parameters()))
    seen: dict[str, Any] = train(accelerator, model, optimizer, range(12), micro)
    seen |= saved_of(net, optimizer.state_dict())
    detach(accelerator)
    prompt = 0 if mode == "delayed" else NEVER_STALE
    more = {"max_norm": 0.5, "micro": micro, "autocast": True}
    assert_same_run(seen, run_reference(kind, prompt, make=brain, **more))


@pytest.mark.usefixtures("kernel_without_bfloat16")
@pytest.mark.parametrize(("mode", "offload", "wish"), WAYS)
def test_saved_and_resumed_in_the_middle(
    mode: str, offload: str, wish: str, tmp_path: Path
) -> None:
    """The checkpoint's model is bfloat16 and the newest; what goes on from it is the same run."""

    def begin() -> tuple[Any, Any, Any]:
        accelerator = attached(mode, offload, wish)
        net = brain()
        return accelerator, *accelerator.prepare(net, OPTIMIZERS["adamw"](net.parameters()))

    accelerator, model, optimizer = begin()
    train(accelerator, model, optimizer, range(4))
    accelerator.save_state(tmp_path / "middle", safe_serialization=False)
    written = torch.load(tmp_path / "middle" / "pytorch_model.bin")
    assert {t.dtype for t in written.values()} == {BRAIN}
    masters = [e.get("master") for e in optimizer.state_dict()["state"].values()]
    for p, master in zip(written.values(), masters, strict=True):
        assert (master is None) is (wish == "none")
        if master is not None:
            assert torch.equal(p, master.to(BRAIN))
    rest = train(accelerator, model, optimizer, range(4, 9))
    whole_state = optimizer.state_dict()  # waits for what is late
    whole = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    detach(accelerator)
    accelerator, model, optimizer = begin()
    accelerator.load_state(tmp_path / "middle")
    assert train(accelerator, model, optimizer, range(4, 9)) == rest
    assert same(optimizer.state_dict(), whole_state)
    found = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    assert same(found, whole)
    detach(accelerator)


@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_met_is_refused_and_nothing_is_changed(late: bool) -> None:
    """A parameter twice in one group would have two masters."""
    accelerator = attached("sync") if not late else Accelerator(cpu=True, mixed_precision="fp16")
    net = brain()
    optimizer = torch.optim.SGD([p for p in net.parameters()], lr=0.1)  # noqa: C416
    optimizer.param_groups[0]["params"].append(net[0].weight)
    if late:
        accelerator.prepare(net, optimizer)
    refused = pytest.raises(UnsupportedError, match="master_weights='none'")
    with refused:
        attach(accelerator) if late else accelerator.prepare(net, optimizer)
    if late:
        assert type(accelerator) is Accelerator
    else:
        assert not accelerator._optimizers
        detach(accelerator)


@pytest.mark.usefixtures("kernel_without_bfloat16")
def test_a_step_within_autocast() -> None:
    """Where some call it, as torch's documentation says not to."""
    accelerator = attached(wish="none")
    net = brain()
    model, optimizer = accelerator.prepare(net, OPTIMIZERS["sgd"](net.parameters()))
    before = [p.detach().clone() for p in net.parameters()]
    with accelerator.autocast():
        accelerator.backward(loss_of(model, 0))
        optimizer.step()
    assert not same([p.detach() for p in net.parameters()], before)
    detach(accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_a_trainer_leaves_the_newest_adapters_to_be_saved_and_merged(
    mode: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    reset()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=16, max_position_embeddings=16, **sizes)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear")
    model = BertForSequenceClassification(config).to(BRAIN)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    rows = [
        {"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)} for i in range(24)
    ]
    arguments = TrainingArguments(
        str(tmp_path),
        fp16=True,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    settings = ScalerConfig(step_mode=mode, init_scale=INIT_SCALE)  # type: ignore[arg-type]
    trainer = attach(Trainer(model, arguments, train_dataset=rows), settings)
    trainer.train()
    query = model.base_model.model.bert.encoder.layer[0].attention.self.query
    expected = query.base_layer.weight.detach() + query.get_delta_weight("default").detach()
    trainer.save_model()
    merged = model.merge_and_unload().bert.encoder.layer[0].attention.self.query.weight
    trained = [p.detach() for group in trainer.optimizer.param_groups for p in group["params"]]
    masters = [entry["master"] for entry in trainer.optimizer.state_dict()["state"].values()]
    assert same(trained, [master.to(BRAIN) for master in masters])
    assert torch.equal(merged.detach(), expected)
    assert bool(query.get_delta_weight("default").any())
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert {t.dtype for t in written.values()} == {BRAIN}
    assert all(any(torch.equal(t, p) for p in trained) for t in written.values())
    detach(trainer)
