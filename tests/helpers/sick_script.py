"""A script of a new user: a small T5 in which one feed-forward overflows float16 at any scale."""

import json
from typing import Any

import torch
from accelerate import Accelerator
from transformers import T5Config, T5ForConditionalGeneration

WINDOWS, LR = 12, 0.5
SICK = "encoder.block.1.layer.1.DenseReluDense"


def make() -> Any:
    """``wo`` overflows in the forward; once it is in float32, ``act`` does in the backward."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(
            **sizes,
            num_layers=2,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        )
    )
    with torch.no_grad():
        feed_forward = model.get_submodule(SICK)
        feed_forward.wi_0.weight.mul_(200)
        feed_forward.wo.weight.mul_(2000)
    return model


def batches() -> list[torch.Tensor]:
    words = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    return [words] * WINDOWS


def main() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, skips = [], 0
    for words in batches():
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        skips += optimizer.step_was_skipped
    if accelerator.is_main_process:
        print("FACTS " + json.dumps({"losses": losses, "skips": skips}), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
