"""What can be found wrong with a run before anything is started or written: configuration, data, tokenizer."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.architecture import linear_layers, read_architecture, read_model_config
from engine.capacity import Machine, capacity
from engine.checks import check_sizes
from engine.config import RunConfig
from engine.data.check import DataCheck
from engine.data.completions import Example, prepare_sft
from engine.data.prepare import Prepared, examine
from engine.data.report import DataReport
from engine.errors import ConfigError, DataError, Problem
from engine.loading import Parsed, parse_config, refused, touches
from engine.remote import require_place
from engine.roots import local_root
from engine.sizing import GIB
from engine.trainchecks import check_division

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DECIDE_SIZES = (
    "model",
    "data",
    "algorithm",
    "rollout",
    "train",
    "placement",
    "iterations",
    "checkpoint",
    "evaluation",
)


@dataclass(frozen=True)
class DataFindings:
    """What a run would read, prepared, and the check that says everything that is wrong with it."""

    tokenizer: "PreTrainedTokenizerBase | None"
    prepared: Prepared
    examples: list[Example]  # of the supervised stage
    sft_report: DataReport | None  # None = no supervised stage, or nothing known about its data
    check: DataCheck


def preflight(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None) -> RunConfig:
    """A configuration without faults, in a fraction of a second; a root that is a URL was seen to be usable.

    Where it has some, data and tokenizer are looked at as well, so that one ConfigError lists all there is to fix.
    """
    parsed = parse_config(source, overrides)
    if parsed.config is not None and not parsed.problems:
        require_place(parsed.config.root)
        return parsed.config
    raise refused([*parsed.problems, *_data_problems(parsed)])


def preflight_dry(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None, architecture: Path | None
) -> RunConfig:
    """The same for a dry run: where there are faults, sizes are looked at as well.

    architecture: folder whose config.json the sizes are planned from, for another machine than this one; None = the
    model of the run, on this machine.
    """
    parsed = parse_config(source, overrides, elsewhere=architecture is not None)
    if parsed.config is not None and not parsed.problems:
        return parsed.config
    raise refused([*parsed.problems, *_data_problems(parsed), *_size_problems(parsed, architecture)])


def described_machine(config: RunConfig) -> Machine:
    """As much of a machine as the configuration tells."""
    stated = config.placement.device_memory_gib
    return Machine(gpu_bytes=None if stated is None else int(stated * GIB))


def require_room(config: RunConfig, model: Path) -> None:
    """Raise ConfigError if the disk has no room for all that a new run will write, by the shapes of its model."""
    shapes = read_architecture(model)
    if shapes is None:
        return
    sizes = capacity(config, shapes, Machine(disk_bytes=free_bytes(local_root(config.root))))
    if problems := [problem for problem in sizes.problems if problem.key == "root"]:
        raise refused(problems)


def free_bytes(folder: Path) -> int:
    """Free bytes where a folder is, or would be made."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(there).free


def look_at_data(config: RunConfig, model: Path | None) -> DataFindings:
    """What the data holds and what is wrong with it; model: folder of the base model, None = lengths not checked."""
    problems: list[Problem] = []
    tokenizer = _tokenizer(config, model, problems) if model is not None else None
    prepared, found = _prompts(config, tokenizer)
    problems += found
    examples, sft_report = _examples(config, prepared, tokenizer, problems)
    if model is not None:
        problems += check_positions(config, model)
        problems += check_layers(config, model)
        problems += check_adapters(config, model)
    return DataFindings(tokenizer, prepared, examples, sft_report, DataCheck(prepared.report, problems))


def _prompts(config: RunConfig, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[Prepared, list[Problem]]:
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


def _examples(
    config: RunConfig, prepared: Prepared, tokenizer: "PreTrainedTokenizerBase | None", problems: list[Problem]
) -> tuple[list[Example], DataReport | None]:
    """The rows that the supervised stage learns; what is wrong with them is added to the problems."""
    if config.sft is None or tokenizer is None:
        return [], None
    try:
        return prepare_sft(
            config.sft.data or config.data.train,
            config.data,
            tokenizer,
            max_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            held_out=[*prepared.eval, *(prompt for suite in prepared.suites.values() for prompt in suite)],
            split_name="sft.data" if config.sft.data else "data.train",
        )
    except DataError as error:
        problems += error.problems
        return [], None


def check_positions(config: RunConfig, model: Path) -> list[Problem]:
    """Whether the longest prompt and response fit the positions of the model in a folder."""
    try:
        positions = read_model_config(model).get("max_position_embeddings")
    except ConfigError as error:
        return error.problems
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


def check_layers(config: RunConfig, model: Path) -> list[Problem]:
    """Whether the layers of the model in a folder can be cut as train.tensor_parallel asks."""
    try:
        return check_division(read_model_config(model), config.train.tensor_parallel)
    except ConfigError:
        return []  # check_positions says what is wrong with the file


def check_adapters(config: RunConfig, model: Path) -> list[Problem]:
    """Whether the layers of the model in a folder can be given the adapters of model.lora."""
    lora = config.model.lora
    try:
        layers = linear_layers(model) if lora is not None else None
    except ConfigError:
        return []  # check_positions says what is wrong with the file
    if lora is None or layers is None:
        return []
    known, problems = ", ".join(sorted(layers)), []
    for index, target in enumerate(lora.targets):
        if target not in layers:
            remedy = f"no linear layer of the model has this name; it has {known}"
            problems.append(Problem(f"model.lora.targets[{index}]", target, remedy))
    sides = {layers[target]: target for target in lora.targets if target in layers}
    if sides and lora.rank > min(sides):
        remedy = f"{sides[min(sides)]} has a side of {min(sides)}: a larger rank adds nothing; use {min(sides)} or less"
        problems.append(Problem("model.lora.rank", lora.rank, remedy))
    return problems


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


def _size_problems(parsed: Parsed, architecture: Path | None) -> list[Problem]:
    """Problems of memory and disk, as far as the options that decide them could be parsed."""
    config = parsed.config
    if config is None or any(name.split(".")[0] in _DECIDE_SIZES for name in parsed.unknown):
        return []
    folder = architecture or Path(config.model.source)
    if not folder.is_dir():
        return []
    try:
        shapes = read_architecture(folder)
    except ConfigError as error:
        return error.problems
    return [] if shapes is None else capacity(config, shapes, described_machine(config)).problems


def _tokenizer(config: RunConfig, model: Path, problems: list[Problem]) -> "PreTrainedTokenizerBase | None":
    from engine.data.templating import load_tokenizer

    try:
        return load_tokenizer(str(model), config.model.chat_template)
    except (ConfigError, DataError) as error:
        problems += error.problems or [Problem("model.source", str(model), f"{error.message} {error.remedy}".strip())]
        return None
