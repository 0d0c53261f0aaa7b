"""Configurations as YAML files for tests of loading, checks and the command."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from engine.config import RunConfig

CONTENT: dict[str, Any] = {
    "name": "sums",
    "seed": 3,
    "model": {"source": "model", "init": "random"},
    "data": {"train": [{"path": "sums.jsonl"}], "eval_fraction": 0.2, "max_prompt_tokens": 16},
    "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
    "train": {"prompts_per_iteration": 8, "mini_batches": 2},
    "reward": [{"kind": "exact_match"}],
    "iterations": 3,
}


def content(**changed: Any) -> dict[str, Any]:
    """Valid options; a section given as a dict is merged into the present one, None removes it."""
    options = copy.deepcopy(CONTENT)
    for name, value in changed.items():
        if isinstance(value, dict) and isinstance(options.get(name), dict):
            options[name] = {**options[name], **value}
        elif value is None:
            options.pop(name, None)
        else:
            options[name] = value
    return options


def config(**changed: Any) -> RunConfig:
    """The same as a parsed configuration, its files unchecked."""
    return RunConfig.model_validate(content(**changed))


def write_rows(file: Path, count: int = 40, prompt: Any = "{}+1=") -> Path:
    """A JSONL file of additions; a list as prompt is taken for messages."""
    rows = []
    for number in range(count):
        asked = prompt if isinstance(prompt, list) else prompt.format(number)
        rows.append(json.dumps({"prompt": asked, "answer": str(number + 1)}))
    file.write_text("\n".join(rows) + "\n")
    return file


def write_config(folder: Path, text: str | None = None, **changed: Any) -> Path:
    """A YAML file in `folder` beside its data and an empty model folder; text: its content word for word."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    write_rows(folder / "sums.jsonl")
    file = folder / "sums.yaml"
    file.write_text(yaml.safe_dump(content(**changed)) if text is None else text)
    return file
