"""Weights as named tensors and as Hugging Face folders: read, check, write, digest."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Size, Tensor

from engine.errors import DivergedError, StoreError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

# What a model folder holds besides its weights: generation defaults, tokenizer, chat templates, licence.
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder in safetensors, by name, mapped from the files: clone what you want to change or keep.

    Reads one file or a sharded set with its index. Raises StoreError if a file is missing, cut off or not safetensors.
    """
    if not (folder / INDEX).is_file():
        return _load_file(folder / WEIGHTS)
    shard_of = json.loads((folder / INDEX).read_text())["weight_map"]
    shards = {shard: _load_file(folder / shard) for shard in sorted(set(shard_of.values()))}
    absent = [name for name, shard in shard_of.items() if name not in shards[shard]]
    if absent:
        raise StoreError(f"{folder / INDEX} promises {_listed(absent)}; the files do not hold it.", remedy=_REFETCH)
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no mapping
    except (OSError, SafetensorError) as error:
        raise StoreError(f"weights cannot be read from {path}: {error}.", remedy=_REFETCH) from error


def save_folder(weights: Mapping[str, Tensor], source: Path, target: Path, *, head: str = "lm") -> None:
    """Make `target` a complete model folder: these weights, and config, tokenizer and templates of `source`.

    Nothing is written unless the weights are exactly what the config of `source` needs (tied copies left out), with
    every tensor of its full size and finite: StoreError or DivergedError names the tensor.
    """
    from engine.backends.modelling import expected_shapes  # here, because it loads transformers

    check_tensors(weights, expected_shapes(source, head), f"weights to be saved in {target}")
    for name, tensor in weights.items():
        if not is_finite(tensor):
            raise DivergedError(f"{name} holds values that are not finite; it was not saved in {target}.")
    target.mkdir(parents=True, exist_ok=True)
    dtype = next(iter(weights.values())).dtype
    config = _config_of(source, dtype)
    if head == "score":
        config = _classifier(config, source)
    (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    save_file(dict(weights), target / WEIGHTS, metadata={"format": "pt"})


def _config_of(source: Path, dtype: torch.dtype) -> dict[str, object]:
    config: dict[str, object] = json.loads((source / CONFIG).read_text())
    name = str(dtype).removeprefix("torch.")
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    return {**config, "dtype": name}


def _classifier(config: dict[str, object], source: Path) -> dict[str, object]:
    """The config with which AutoModelForSequenceClassification reads one plain score.

    It looks for the last token that is no padding. Where padding is also an end token, that would be a token too early:
    without a padding token it reads the last token, and takes sequences only one at a time.
    """
    from engine.backends.modelling import classifier_of

    ends = config.get("eos_token_id")
    pad = config.get("pad_token_id")
    config = {name: value for name, value in config.items() if name != "num_labels"}
    return config | {
        "architectures": [classifier_of(source)],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
        "problem_type": "regression",
        "pad_token_id": None if pad in (ends if isinstance(ends, list) else [ends]) else pad,
    }


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Size], what: str) -> None:
    """Raises StoreError unless the tensors have exactly these names and shapes; `what` starts the message."""
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {_listed(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        problems.append(f"unknown {_listed(extra)}")
    for name in sorted(expected.keys() & found.keys()):
        if found[name].shape != expected[name]:
            problems.append(f"{name} is {list(found[name].shape)} instead of {list(expected[name])}")
    if problems:
        raise StoreError(f"{what}: {_listed(problems, '; ')}.", remedy="Use the tensors of this model.")


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; its extremes tell, in one pass and without a mask of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over sorted names, types, shapes and bytes; files and order do not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_REFETCH = "Fetch or write the folder again."


def _listed(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(items[:5])
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown
