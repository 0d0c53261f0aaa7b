"""A complete small model folder: random Llama weights, one token per character, chat template, generation defaults."""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tests.helpers.tiny import tiny_config
from tests.helpers.tokenizers import TURNS, char_tokenizer


def save_model(folder: Path, *, template: str | None = TURNS, tied: bool = True, seed: int = 0) -> Path:
    """The folder, now holding a model of hidden size 64 that any loader of Hugging Face folders takes."""
    tokenizer = char_tokenizer(template=template)
    config = tiny_config(tied=tied)
    config.vocab_size = len(tokenizer)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder
