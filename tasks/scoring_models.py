"""Reward models that a configuration names: found, and fit to score the policy's tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import RunConfig
from engine.data.fingerprint import tokenizer_fingerprint
from engine.data.templating import load_tokenizer
from engine.errors import ConfigError, DataError, Problem
from engine.loading import refused
from tasks.models import resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLASSIFIER = "ForSequenceClassification"


def scoring_models(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Path]:
    """Local folder of every reward and cost model by the key of its option. Raises ConfigError with all that cannot score.

    A model scores the very ids of the policy, so its tokenizer has to be the policy's, chat template included.
    """
    folders: dict[str, Path] = {}
    problems: list[Problem] = []
    for key, entry in config.scoring_models.items():
        try:
            folders[key] = folder = _folder(entry.source, config)
            fault = fault_of(folder, tokenizer)
        except (ConfigError, DataError) as error:
            fault = "; ".join(problem.remedy for problem in error.problems) or f"{error.message} {error.remedy}"
        if fault is not None:
            problems.append(Problem(f"{key}.source", entry.source, fault))
    if problems:
        raise refused(problems)
    return folders


def fault_of(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Why the model in a folder cannot score the tokens of this tokenizer; None if it can."""
    content = json.loads((folder / "config.json").read_text())
    classes, labels = content.get("architectures") or ["none"], content.get("id2label") or {}
    if not classes[0].endswith(_CLASSIFIER) or len(labels) != 1:
        found = f"{classes[0]} with {len(labels)} labels"
        return (
            f"it is no reward model: it needs a class ...{_CLASSIFIER} with one label, found {found}; "
            "make one with hybridflow reward-model"
        )
    if tokenizer_fingerprint(load_tokenizer(str(folder), None)) != tokenizer_fingerprint(tokenizer):
        return (
            "its tokenizer or chat template is not the policy's, whose tokens it would have to score; "
            "train a reward model from a model of the policy's family"
        )
    return None


def _folder(source: str, config: RunConfig) -> Path:
    return resolve_source(source, config.root, config.registry.tracking_uri if config.registry else None)
