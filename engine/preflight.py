"""What can be found wrong with a run before anything is started or written: configuration, data, tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checks import check_sizes
from engine.config import RunConfig
from engine.data.check import DataCheck
from engine.data.prepare import Prepared, examine
from engine.errors import ConfigError, DataError, Problem
from engine.loading import Parsed, parse_config, refused, touches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataFindings:
    """What a run would read: rows it would use, the report about them, and everything that is wrong."""

    train_rows: int
    eval_rows: int
    check: DataCheck


def preflight(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None) -> RunConfig:
    """A configuration without faults, in a fraction of a second.

    Where it has some, data and tokenizer are looked at as well, so that one ConfigError lists all there is to fix.
    """
    parsed = parse_config(source, overrides)
    if parsed.config is not None and not parsed.problems:
        return parsed.config
    raise refused([*parsed.problems, *_data_problems(parsed)])


def look_at_data(config: RunConfig, model: Path | None) -> DataFindings:
    """What the data holds and what is wrong with it; model: folder of the base model, None = lengths not checked."""
    problems: list[Problem] = []
    tokenizer = _tokenizer(config, model, problems) if model is not None else None
    prepared, found = examine_run(config, tokenizer)
    problems += found
    if model is not None:
        problems += check_positions(config, model)
    return DataFindings(len(prepared.train), len(prepared.eval), DataCheck(prepared.report, problems))


def examine_run(config: RunConfig, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[Prepared, list[Problem]]:
    """The prompts of a run and everything that is wrong with its data, too few rows for one iteration included."""
    prepared, problems = examine(
        config.data,
        tokenizer,
        needs_answer=config.needs_answer,
        seed=config.seed,
        suites=config.evaluation.suites,
    )
    unreadable = [key for key in ("data.train", "data.eval") if any(item.key.startswith(key) for item in problems)]
    sizes = check_sizes(config, len(prepared.train), len(prepared.eval)) if "data.train" not in unreadable else []
    return prepared, problems + [item for item in sizes if item.key not in unreadable]


def check_positions(config: RunConfig, model: Path) -> list[Problem]:
    """Whether the longest prompt and response fit the positions of the model in a folder."""
    file = model / "config.json"
    if not file.is_file():
        return [Problem("model.source", str(model), "the folder holds no config.json, so it is no model folder")]
    positions = json.loads(file.read_text()).get("max_position_embeddings")
    response = max(
        [config.rollout.max_response_tokens, *(s.max_response_tokens or 0 for s in config.evaluation.suites)]
    )
    wanted = config.data.max_prompt_tokens + response
    if positions is None or wanted <= positions:
        return []
    remedy = (
        f"with {response} response tokens a sample has up to {wanted}; the model has {positions} positions. Lower one"
    )
    return [Problem("data.max_prompt_tokens", config.data.max_prompt_tokens, remedy)]


def _data_problems(parsed: Parsed) -> list[Problem]:
    """Problems of data and tokenizer, as far as the options about them could be parsed."""
    config = parsed.config
    if config is None or touches("data.train", parsed.unknown) or "data" in parsed.unknown:
        return []
    if any(name.startswith("reward") for name in parsed.unknown):
        config = config.model_copy(update={"reward": ()})  # whether answers are needed is not known
    known = Path(config.model.source).is_dir() and not touches("model.source", parsed.unknown)
    findings = look_at_data(config, Path(config.model.source) if known else None)
    return [problem for problem in findings.check.problems if not touches(problem.key, parsed.unknown)]


def _tokenizer(config: RunConfig, model: Path, problems: list[Problem]) -> "PreTrainedTokenizerBase | None":
    from engine.data.templating import load_tokenizer

    try:
        return load_tokenizer(str(model), config.model.chat_template)
    except (ConfigError, DataError) as error:
        problems += error.problems or [Problem("model.source", str(model), f"{error.message} {error.remedy}".strip())]
        return None
