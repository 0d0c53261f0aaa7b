"""What can be found wrong with a run on fixed rows before anything is started or written: options, data, tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.architecture import read_model_config
from engine.data.check import DataCheck
from engine.data.offline import OfflineRows, examine_offline
from engine.errors import ConfigError, DataError, Problem
from engine.loading import Parsed, refused, touches
from engine.offline_checks import check_rows
from engine.offline_loading import parse_offline
from engine.offlineconfig import OfflineConfig
from engine.remote import require_place
from engine.trainchecks import check_division

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OfflineFindings:
    """What a run would read, prepared, and the check that says everything that is wrong with it."""

    tokenizer: "PreTrainedTokenizerBase | None"
    rows: OfflineRows
    check: DataCheck


def preflight_offline(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None) -> OfflineConfig:
    """A configuration without faults. Where it has some, data and tokenizer are looked at as well, so that one ConfigError
    lists all there is to fix."""
    parsed = parse_offline(source, overrides)
    if parsed.config is not None and not parsed.problems:
        require_place(parsed.config.root)
        return parsed.config
    raise refused([*parsed.problems, *_data_problems(parsed)])


def look_at_offline_data(config: OfflineConfig, model: Path | None) -> OfflineFindings:
    """What the data holds and what is wrong with it; model: folder of the base model, None = lengths not checked."""
    problems: list[Problem] = []
    tokenizer = _tokenizer(config, model, problems) if model is not None else None
    rows, found = examine_offline(config, tokenizer)
    problems += found
    unreadable = any(problem.key.startswith(("data.train", "data.eval")) for problem in problems)
    if tokenizer is not None and not unreadable:
        problems += check_rows(config, len(rows.train), len(rows.eval))
    if model is not None:
        problems += _check_model(config, model)
    return OfflineFindings(tokenizer, rows, DataCheck(rows.report, problems))


def _check_model(config: OfflineConfig, model: Path) -> list[Problem]:
    """Whether the longest row fits the positions of the model in a folder, and its layers the ranks that share them."""
    try:
        shapes = read_model_config(model)
    except ConfigError as error:
        return error.problems
    positions, problems = shapes.get("max_position_embeddings"), check_division(shapes, config.train.tensor_parallel)
    if positions is not None and config.data.max_tokens > positions:
        remedy = f"the model has {positions} positions; use at most that many"
        problems.append(Problem("data.max_tokens", config.data.max_tokens, remedy))
    return problems


def _data_problems(parsed: Parsed[OfflineConfig]) -> list[Problem]:
    """Problems of data and tokenizer, as far as the options about them could be parsed."""
    config = parsed.config
    if config is None or any(touches(name, parsed.unknown) for name in ("data", "data.train", "objective")):
        return []
    known = Path(config.model.source).is_dir() and not touches("model.source", parsed.unknown)
    findings = look_at_offline_data(config, Path(config.model.source) if known else None)
    return [problem for problem in findings.check.problems if not touches(problem.key, parsed.unknown)]


def _tokenizer(config: OfflineConfig, model: Path, problems: list[Problem]) -> "PreTrainedTokenizerBase | None":
    from engine.data.templating import load_tokenizer

    try:
        return load_tokenizer(str(model), config.model.chat_template)
    except (ConfigError, DataError) as error:
        problems += error.problems or [Problem("model.source", str(model), f"{error.message} {error.remedy}".strip())]
        return None
