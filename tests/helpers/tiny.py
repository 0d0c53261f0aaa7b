"""Model folders small enough to build in every test: random Llama models of two layers with a character tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = [chr(code) for code in range(32, 127)]
VOCAB_SIZE = 3 + len(CHARACTERS) + 2  # two merges besides the characters


def tiny_folder(folder: Path, *, tied: bool = False, **heads: int) -> Path:
    """A folder with config and tokenizer and no weights: hidden 64, 2 layers, head 32, 100 ids, 256 positions."""
    vocabulary = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    for token in [*CHARACTERS, "he", "ll"]:
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    tiny_config(tied=tied, **heads).save_pretrained(folder)
    return folder


def tiny_config(*, tied: bool = False, **heads: int) -> LlamaConfig:
    """Configuration of the tiny model; its head dimension is the least that vLLM's CPU attention takes."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, **heads}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=tied,
        **heads,
    )


def tiny_model(seed: int, *, tied: bool = False, scale: float = 8.0, **heads: int) -> LlamaForCausalLM:
    """A random float32 model in evaluation mode; `scale` sharpens its distributions, which are all but flat at 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(tied=tied, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model.eval()


def named_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The weights of a model by name, both names of tied ones."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def chain_weights(following: dict[int, int]) -> dict[str, Tensor]:
    """Weights with which each given token is followed by its successor with a probability of 0.97."""
    weights = named_weights(tiny_model(0, scale=1.0))
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embeddings, outputs = weights["model.embed_tokens.weight"].zero_(), weights["lm_head.weight"].zero_()
    for place, (token, successor) in enumerate(following.items()):
        embeddings[token, place] = 1.0
        outputs[successor, place] = 1.0
    return weights
