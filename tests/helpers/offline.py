"""Small real runs on fixed rows: the tiny model, pairs whose better completion is a rule, all in this process."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.data.completions import Example, Preference
from engine.data.examplefile import save_examples
from engine.data.pairfile import save_pairs
from engine.offlineconfig import OfflineConfig
from engine.runs import Run, create_run
from engine.store import StepRef
from tests.helpers.runs import encode
from tests.helpers.tiny import BOS, EOS, tiny_folder
from tests.helpers.training import model_folder


def score_model(folder: Path) -> Path:
    """The folder, now holding a tiny model with a score head."""
    made = model_folder(folder)
    weights = {
        name: tensor for name, tensor in load_file(made / "model.safetensors").items() if name != "lm_head.weight"
    }
    weights["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def pair(index: int) -> Preference:
    """The index-th pair: the better completion says the larger digit, and digits above 6 are unsafe."""
    prompt = (BOS, *encode(f"{index % 7}?"))
    low, high = index % 4, 5 + index % 5
    return Preference(
        prompt,
        (*encode(str(high)), EOS),
        (*encode(str(low)), *encode(str(low)), EOS),
        margin=0.5,
        chosen_is_safe=True,
        rejected_is_safe=index % 2 == 0,
    )


def example(index: int) -> Example:
    """A digit after a question."""
    prompt = (BOS, *encode(f"{index % 7}?"))
    return Example((*prompt, *encode(str(index % 7)), EOS), len(prompt))


def offline_config(root: Path, source: Path, objective: str, **sections: Any) -> OfflineConfig:
    """A few optimiser steps on the tiny model, everything in this process."""
    content: dict[str, Any] = {
        "name": "tiny",
        "seed": 11,
        "root": str(root),
        "model": {"source": str(source), "init": "random"},
        "data": {"train": [{"path": "memory"}], "max_prompt_tokens": 8, "max_tokens": 16},
        "objective": {"name": objective},
        "train": {"backend": "torch", "lr": 1e-3, "batch_size": 6},
        "placement": {"mode": "local"},
        "checkpoint": {"every": 2},
        "steps": 6,
    }
    for name, section in sections.items():
        both = isinstance(content.get(name), dict) and isinstance(section, dict)
        content[name] = {**content[name], **section} if both else section
    return OfflineConfig.model_validate(content)


def offline_run(root: Path, run_key: str, objective: str, **sections: Any) -> tuple[Run[OfflineConfig], StepRef]:
    """A run with its data committed, and that step. The same folder and key continue an existing run."""
    source = root / "model"
    if not source.exists():
        tiny_folder(source)
    run = create_run(offline_config(root, source, objective, **sections), run_key, source, {"data": "fixed"})
    if done := run.store.committed("data"):
        return run, done
    with run.store.commit("data") as draft:
        if objective == "sft":
            save_examples([example(index) for index in range(20)], draft.folder / "train.parquet")
            save_examples([example(index) for index in range(5)], draft.folder / "eval.parquet")
        else:
            save_pairs([pair(index) for index in range(20)], draft.folder / "train.parquet")
            save_pairs([pair(index) for index in range(20, 28)], draft.folder / "eval.parquet")
    return run, draft.ref
