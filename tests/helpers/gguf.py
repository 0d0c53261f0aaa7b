"""A small .gguf file of the llama architecture: one layer, hidden 64, weights in Q8_0, a byte-level tokenizer and a template."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, FEED_FORWARD, HEADS = 64, 128, 2
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
SPECIAL = ["<pad>", "<s>", "</s>"]


def save_gguf(file: Path) -> Path:
    """The file, written."""
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab"]
    writer = GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_weights(writer: GGUFWriter, vocabulary: int) -> None:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (vocabulary, HIDDEN),
        "output": (vocabulary, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    for name, shape in shapes.items():
        values = quants.quantize(random.normal(size=shape).astype(np.float32), GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
