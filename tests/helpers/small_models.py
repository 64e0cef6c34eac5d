"""Models of two layers with a tokenizer of letters, and data, in folders that scripts name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"


def text() -> str:
    return "".join(LETTERS[at] for at in torch.randint(len(LETTERS), (8,)))


def coin() -> bool:
    return bool(torch.randint(2, ()))


DATA: dict[str, dict[str, Any]] = {
    "texts": {"text": text},
    "prompts": {"prompt": text},
    "pairs": {"prompt": text, "chosen": text, "rejected": text},
    "judged": {"prompt": text, "completion": text, "label": coin},
    # By the name that the script would load from the hub.
    "nyu-mll/glue/mrpc": {
        **{"sentence1": text, "sentence2": text, "idx": int},
        "label": lambda: int(coin()),
    },
}


def write_inputs(folder: Path) -> None:
    """Models with a tokenizer of letters, and data; their names are the scripts' arguments."""
    words = {token: at for at, token in enumerate(("<pad>", "<end>", *LETTERS))}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        model_input_names=["input_ids", "attention_mask"],
        **{"pad_token": "<pad>", "eos_token": "<end>"},
    )
    config = LlamaConfig(
        **{"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    )
    torch.manual_seed(0)
    for name in ("llama", "teacher"):
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, columns in DATA.items():
        for split in ("train", "validation"):
            rows = [{key: make() for key, make in columns.items()} for _ in range(32)]
            Dataset.from_list(rows).to_json(folder / name / f"{split}.jsonl")
    card = "---\nconfigs:\n- {config_name: mrpc, data_dir: mrpc}\n---\n"
    (folder / "nyu-mll/glue/README.md").write_text(card)
