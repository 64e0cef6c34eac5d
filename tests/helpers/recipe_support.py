"""Recipes as modules, run in this process; a tiny causal language model and a short text."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest
import torch
from places import ROOT
from support import reset

RECIPES = ROOT / "recipes"

CHARACTERS = 6000


def tiny_model(folder: Path, dropout: float) -> Path:
    """Save a GPT-2 of 31 thousand parameters, and its tokenizer, where the recipes load them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False
    )
    bytewise.train_from_iterator([topics["while"]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        size: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        end = tokenizer.eos_token_id
        config = GPT2Config(
            vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **size, **drop
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def short_text(path: Path, characters: int = CHARACTERS) -> Path:
    """Write the start of Python's help texts."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    path.write_text(text[:characters], encoding="utf-8")
    return path


def run(recipe: ModuleType, out: Path, *args: object) -> str:
    """Run it as in a process of its own; what its result file says."""
    reset()
    recipe.main([str(arg) for arg in (*args, "--output_dir", out)])
    return (out / recipe.RESULT_FILE).read_text(encoding="utf-8")


def refusal(recipe: ModuleType, *args: object) -> str:
    """The one line that a run ends with."""
    reset()
    with pytest.raises(SystemExit) as ended:
        recipe.main([str(arg) for arg in args])
    message = ended.value.code
    assert isinstance(message, str), "not a message: exit status 0, or argparse"
    assert "\n" not in message
    assert message.startswith(f"{recipe.__name__}: error: ")
    return message
