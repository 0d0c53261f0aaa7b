"""A complete small model folder: random Llama weights, one token per character, chat template, generation defaults."""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.helpers.tokenizers import TURNS, char_tokenizer


def save_model(folder: Path, *, template: str | None = TURNS, tied: bool = True, seed: int = 0) -> Path:
    """The folder, now holding a model of hidden size 64 that any loader of Hugging Face folders takes."""
    tokenizer = char_tokenizer(template=template)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=tied,
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
