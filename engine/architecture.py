"""What the config.json of a decoder model says about its size: exact parameter counts, and the shapes memory follows from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, Problem

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Family:
    """What a model type adds to the plain decoder layer (attention and gated MLP, each behind a norm)."""

    bias: str = ""  # of query, key and value: "always", or the key of config.json that says so
    output_bias: str = ""  # of the attention's output: the same
    mlp_bias: str = ""
    norms: int = 2  # of hidden size, per layer
    head_norms: bool = False  # one norm of head size each for queries and keys
    tied: bool = False  # whether input and output embeddings are one where config.json does not say


FAMILIES = {
    "llama": Family(bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(),
    "qwen2": Family(bias="always"),
    "qwen3": Family(bias="attention_bias", output_bias="attention_bias", head_norms=True),
    "gemma": Family(bias="attention_bias", output_bias="attention_bias", tied=True),
    "gemma2": Family(bias="attention_bias", output_bias="attention_bias", norms=4, tied=True),
}
_WITHOUT_FORMULA = {  # sizes that do not follow from others where config.json leaves them out
    "llama": (),
    **dict.fromkeys(("qwen3", "gemma", "gemma2"), ("num_key_value_heads", "head_dim")),
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Architecture:
    """Shapes of one decoder model."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int | None  # None = not limited
    tied: bool
    norms: int  # of hidden size, per layer
    head_norms: bool  # one of head size each for queries and keys
    layer_parameters: int  # of one decoder layer

    @property
    def parameters(self) -> int:
        """Of the language model; tied embeddings count once."""
        outputs = 0 if self.tied else self.vocabulary * self.hidden
        return self.body_parameters + outputs

    @property
    def body_parameters(self) -> int:
        """Of embeddings, layers and last norm."""
        return self.vocabulary * self.hidden + self.layers * self.layer_parameters + self.hidden

    @property
    def value_parameters(self) -> int:
        """Of a critic: the body and one linear output with its bias."""
        return self.body_parameters + self.hidden + 1

    @property
    def query_size(self) -> int:
        """Numbers per token in the queries of all heads."""
        return self.heads * self.head_dim


def read_architecture(folder: Path) -> Architecture | None:
    """The architecture in a model folder; None where it is not known here.

    That is a model type whose layers are not described above, or a config.json that leaves a size to its type's
    default. Raises ConfigError if there is no config.json.
    """
    content = read_model_config(folder)
    model_type = str(content.get("model_type"))
    needed = (*_SIZES, *_WITHOUT_FORMULA.get(model_type, ("num_key_value_heads",)))
    if model_type not in FAMILIES or not all(isinstance(content.get(name), int) for name in needed):
        return None
    return _architecture(content, FAMILIES[model_type])


def linear_layers(folder: Path) -> dict[str, int] | None:
    """Name of every kind of linear layer, such as q_proj -> its smaller side.

    By the sizes in config.json, else by the header of the weights' file; None where neither tells.
    """
    shapes = read_architecture(folder)
    if shapes is None:
        return _layers_in(folder / WEIGHTS)
    queries, keys = shapes.query_size, shapes.kv_heads * shapes.head_dim
    sides = {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "o_proj": queries,
        "gate_proj": shapes.intermediate,
        "up_proj": shapes.intermediate,
        "down_proj": shapes.intermediate,
        "lm_head": shapes.vocabulary,
    }
    return {name: min(side, shapes.hidden) for name, side in sides.items()}


def _layers_in(file: Path) -> dict[str, int] | None:
    """A safetensors file begins with the length of a JSON header (8 bytes, little endian) that names every tensor."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    found: dict[str, int] = {}
    for name, entry in header.items():
        parts = name.split(".")
        if parts[-1] == "weight" and len(parts) > 1 and len(entry["shape"]) == 2 and "embed" not in parts[-2]:
            found[parts[-2]] = min(*entry["shape"], found.get(parts[-2], entry["shape"][0]))
    return found


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises ConfigError if there is none."""
    file = folder / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _unusable(folder, f"the folder holds no {CONFIG}, so it is no model folder") from None
    except ValueError as error:
        raise _unusable(folder, f"its {CONFIG} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise _unusable(folder, f"its {CONFIG} holds no object")
    return content


def _architecture(content: dict[str, Any], family: Family) -> Architecture:
    hidden, intermediate, layers, heads, vocabulary = (content[name] for name in _SIZES)
    kv_heads = content.get("num_key_value_heads") or heads
    head_dim = content.get("head_dim") or hidden // heads
    return Architecture(
        model_type=content["model_type"],
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        positions=content.get("max_position_embeddings"),
        tied=content.get("tie_word_embeddings", family.tied),
        norms=family.norms,
        head_norms=family.head_norms,
        layer_parameters=_layer_parameters(content, family, kv_heads, head_dim),
    )


def _layer_parameters(content: dict[str, Any], family: Family, kv_heads: int, head_dim: int) -> int:
    def has(bias: str) -> bool:
        return bias == "always" or bool(bias and content.get(bias))

    hidden, intermediate = content["hidden_size"], content["intermediate_size"]
    query, key = content["num_attention_heads"] * head_dim, kv_heads * head_dim
    attention = hidden * (query + 2 * key) + query * hidden
    attention += (query + 2 * key if has(family.bias) else 0) + (hidden if has(family.output_bias) else 0)
    mlp = 3 * hidden * intermediate + (2 * intermediate + hidden if has(family.mlp_bias) else 0)
    return attention + mlp + family.norms * hidden + (2 * head_dim if family.head_norms else 0)


def _unusable(folder: Path, found: str) -> ConfigError:
    return ConfigError("The model cannot be used.", problems=[Problem("model.source", str(folder), found)])
