"""How far a sampler's log-probabilities are from its trainer's, in float16 and in bfloat16.

    python benchmarks/grpo_mismatch.py
    python benchmarks/grpo_mismatch.py --model_name_or_path Qwen/Qwen2.5-0.5B --device cuda

The sampler draws token by token, with a cache of keys and values; the trainer scores the whole
sequence in one forward. Both have the same weights, in one dtype, and the same mathematics; the
difference d is rounding. Over all tokens drawn the table shows |log p(trainer) - log p(sampler)|,
its mean and the largest one as a ratio of probabilities, and the mean of exp(d) - 1 - d, an
estimate of the KL divergence of trainer from sampler that is never negative; then the share of
tokens whose ratio is off by more than 1 %. Each number is a mean over seeds, of weights and tokens.

Without a name the models are new Llamas with large weights, so that tokens differ in probability as
a trained one's do. On a CPU both dtypes are computed as tensor cores do: products of rounded
operands in float32, rounded once. After arXiv 2510.26788, which found this to make
reinforcement learning in bf16 unstable, with samplers whose kernels differ too, which adds to it.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from accel_scaler.integrations.cpu_float16 import emulate_float16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = ("mean |d|", "max ratio", "KL", "off by > 1 %")


def make_model(layers: int, seed: int, name: str | None) -> Any:
    """Load the named model in float32, or make a new one."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.15, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@contextmanager
def precision_of(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Autocast; on a CPU float16 products in float32, as a prepared model's forward has them."""
    emulated = emulate_float16() if device == "cpu" else nullcontext()
    with emulated, torch.autocast(device, dtype=dtype):
        yield


@torch.no_grad()
def differences(model: Any, rows: int, length: int, seed: int) -> Tensor:
    """Draw ``rows`` sequences; return log p(trainer) - log p(sampler) of each token, float64."""
    set_seed(seed)
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(2, vocabulary, (rows, 4)).to(device)
    drawn = model.generate(
        prompt, do_sample=True, max_new_tokens=length, min_new_tokens=length, top_k=0,
        return_dict_in_generate=True, output_logits=True, pad_token_id=0,
    )  # fmt: skip
    tokens = drawn.sequences[:, prompt.shape[1] :, None]
    sampler = torch.stack(drawn.logits, 1).double().log_softmax(-1).gather(-1, tokens)
    full = model(drawn.sequences).logits[:, prompt.shape[1] - 1 : -1]
    trainer = full.double().log_softmax(-1).gather(-1, tokens)
    return (trainer - sampler).flatten().cpu()


def figures(d: Tensor) -> list[float]:
    """Return the numbers of the columns, from differences of log-probabilities."""
    ratio = d.exp()
    away = d.abs().exp()
    kl = (ratio - 1.0 - d).mean()
    return [x.item() for x in (d.abs().mean(), away.max(), kl, (away > 1.01).double().mean())]


def measure(
    layers: int, seeds: int, rows: int, length: int, name: str | None, device: str
) -> dict[str, list[list[float]]]:
    """Return the figures of each dtype, a row a seed; same weights and prompts for both."""
    found: dict[str, list[list[float]]] = {precision: [] for precision in DTYPES}
    for seed in range(seeds):
        for precision in DTYPES:
            model = make_model(layers, seed, name).to(device, DTYPES[precision]).eval()
            with precision_of(DTYPES[precision], device):
                found[precision].append(figures(differences(model, rows, length, seed)))
    return found


def mean(rows: list[list[float]], column: int) -> float:
    """Return the mean over seeds."""
    return math.fsum(row[column] for row in rows) / len(rows)


def table(found: dict[str, list[list[float]]]) -> list[str]:
    """Return the rows of one model; the last row has the ratios of bf16 to fp16."""
    lines = []
    for precision, rows in found.items():
        cells = [mean(rows, column) for column in range(len(COLUMNS))]
        first, ratio, kl, off = cells
        lines.append(f"| {precision} | {first:.2e} | {ratio:.4f} | {kl:.2e} | {100 * off:.2f} % |")
    times = [
        mean(found["bf16"], column) / value if (value := mean(found["fp16"], column)) else math.inf
        for column in (0, 2)
    ]
    return [*lines, f"| bf16 / fp16 | {times[0]:.1f} | | {times[1]:.1f} | |"]


def main(argv: list[str] | None = None) -> None:
    """Print a table for each number of layers."""
    parser = argparse.ArgumentParser(description="Sampler against trainer, in fp16 and bf16.")
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: new Llamas)")
    add("--layers", type=int, nargs="+", default=[2, 8], help="of the new Llamas (default: 2 8)")
    add("--seeds", type=int, default=5, help="(default: %(default)s)")
    add("--rows", type=int, default=16, help="sequences a seed (default: %(default)s)")
    add("--length", type=int, default=64, help="tokens of each (default: %(default)s)")
    add("--device", default="cpu", help="cpu, or the name of torch's accelerator (default: cpu)")
    args = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name = args.model_name_or_path
    for layers in [0] if name else args.layers:
        found = measure(layers, args.seeds, args.rows, args.length, name, args.device)
        what = name or f"{layers} layers"
        print(f"\n{what}, {args.seeds} seeds of {args.rows * args.length} tokens:\n")
        print("| | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
        print("\n".join(table(found)))


if __name__ == "__main__":
    main()
