"""From a YAML file to a RunConfig: everything that is wrong with it in one message, paths made absolute."""

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.checks import check_config
from engine.config import DataSource, RunConfig
from engine.data.sources import source_format
from engine.errors import ConfigError, DataError, Problem
from engine.explain import place_of, problem_of
from engine.roots import is_remote
from engine.trainconfig import Section
from engine.yamlfile import Place, assign, dotted, read_yaml

_PASSES = 5  # leaving out a bad option can uncover that it was required, and its stand-in another
_SQLITE = "sqlite:///"
_SOURCES: tuple[Place, ...] = (
    ("data", "train"),
    ("data", "eval"),
    ("sft", "data"),
    ("evaluation", "suites", "*", "data"),
)
_MODELS: tuple[Place, ...] = (("reward",), ("cost",))  # lists whose entries may name a model as their source
# What takes the place of an option that is missing or unusable, so that everything else can still be checked.
_STAND_INS: dict[str, Any] = {
    "name": "unnamed",
    "model": {"source": "."},
    "model.source": ".",
    "data": {"train": [{"path": "."}]},
    "data.train": [{"path": "."}],
    "data.train.path": ".",
    "data.eval.path": ".",
    "sft.steps": 1,
    "sft.data.path": ".",
    "evaluation.suites.data.path": ".",
    "reward": [{"kind": "exact_match"}],
    "reward.pattern": ".",
    "reward.dataset": "unknown",
    "reward.function": "unknown:unknown",
    "reward.max_tokens": 1,
    "reward.buffer_tokens": 1,
    "reward.url": "http://unknown",
    "reward.base_url": "http://unknown",
    "reward.model": "unknown",
    "reward.template": "{response}",
    "reward.source": ".",
    "algorithm.dataflow": "unknown",
    "iterations": 1,
    "registry.model": "unnamed",
}

C = TypeVar("C", bound=Section)
NamedSources = list[tuple[str, Sequence[DataSource]]]  # key of the option -> its data sources


@dataclass(frozen=True)
class Form(Generic[C]):
    """A kind of configuration file.

    section: its options; sources: where lists of data sources may stand; stand_ins: what takes the place of an option
    that is missing or unusable; check: rules between options (config, unknown options, elsewhere); named_sources,
    named_models: the data and models that a configuration names, by the key of the option.
    """

    section: type[C]
    sources: tuple[Place, ...]
    stand_ins: Mapping[str, Any]
    check: Callable[[C, frozenset[str], bool], list[Problem]]
    named_sources: Callable[[C], NamedSources]
    named_models: Callable[[C], dict[str, str]]


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """What could be made of a configuration.

    problems: everything found so far; unknown: options that are missing or unusable, whose values in `config` mean
    nothing. config is None if nothing can be checked further.
    """

    config: C | None
    problems: list[Problem]
    unknown: frozenset[str]


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None) -> RunConfig:
    """The configuration in a YAML file, or given as its content, changed by `section.option=value` texts.

    Raises one ConfigError that lists every unknown, missing or impossible option and every missing file.
    """
    return accepted(parse_config(source, overrides))


def accepted(parsed: Parsed[C]) -> C:
    """The configuration, if nothing is wrong with it. Raises ConfigError with all that is."""
    if parsed.problems or parsed.config is None:
        raise refused(parsed.problems)
    return parsed.config


def refused(problems: Sequence[Problem]) -> ConfigError:
    """The error for a configuration with these problems; one said twice is shown once."""
    unique = list({(problem.key, str(problem.value)): problem for problem in problems}.values())
    count = f"{len(unique)} problems" if len(unique) > 1 else "one problem"
    return ConfigError(f"The configuration cannot be used: {count}.", problems=unique)


def parse_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None, *, elsewhere: bool = False
) -> Parsed[RunConfig]:
    """Parse and check as far as possible. Raises ConfigError only if there is no mapping of options at all.

    elsewhere: the run is planned for another machine; what this one has is not looked at.
    """
    return parse_form(_RUN, source, overrides, elsewhere=elsewhere)


def parse_form(
    form: Form[C], source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None, *, elsewhere: bool
) -> Parsed[C]:
    """As `parse_config`, for any kind of configuration file."""
    content, problems, base = read_content(source)
    set_here, faults = assign(content, overrides or ())
    problems += faults
    _resolve_paths(content, base, set_here, form.sources)
    _read_schemas(content, base, set_here)
    config, faults, found = _validated(content, form)
    problems += faults
    unknown = frozenset(found)
    if config is not None:
        problems += form.check(config, unknown, elsewhere)
        files = missing_files(form.named_sources(config), form.named_models(config))
        problems += [problem for problem in files if not touches(problem.key, unknown)]
    return Parsed(config, problems, unknown)


def _named_sources(config: RunConfig) -> NamedSources:
    named: NamedSources = [("data.train", config.data.train), ("data.eval", config.data.eval)]
    named += [(f"evaluation.suites[{i}].data", suite.data) for i, suite in enumerate(config.evaluation.suites)]
    if config.sft is not None:
        named.append(("sft.data", config.sft.data))
    return named


def _named_models(config: RunConfig) -> dict[str, str]:
    models = {f"{key}.source": scorer.source for key, scorer in config.scoring_models.items()}
    return {"model.source": config.model.source, **models}


def missing_files(named: NamedSources, models: Mapping[str, str]) -> list[Problem]:
    """Data and model files that are named and not there."""
    problems = []
    for key, sources in named:
        for index, item in enumerate(sources):
            try:
                source_format(item)
            except DataError as error:
                reason = f"{error.message}. {error.remedy}".rstrip(". ")
                problems.append(Problem(f"{key}[{index}].path", item.path, reason))
    for key, model in models.items():
        if _names_a_path(model) and not Path(model).exists():
            problems.append(Problem(key, model, "there is no such file or folder; correct the path"))
    return problems


def touches(key: str, unknown: frozenset[str] | set[str]) -> bool:
    """Whether an option is one of the unknown ones, or lies in one."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in unknown)


def read_content(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem], Path]:
    """Options, keys given twice, and the folder that input paths are relative to."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), [], Path.cwd()
    path = Path(source).expanduser().absolute()
    content, problems = read_yaml(path)
    return content, problems, path.parent


def _validated(content: dict[str, Any], form: Form[C]) -> tuple[C | None, list[Problem], set[str]]:
    """The configuration with faulty options left out, what was wrong with them, and which they are."""
    problems: list[Problem] = []
    unknown: set[str] = set()
    for _ in range(_PASSES):
        try:
            return form.section.model_validate(content), problems, unknown
        except ValidationError as error:
            found = _innermost(error)
        problems += [problem_of(details, form.section) for details in found if dotted(place_of(details)) not in unknown]
        unknown |= {dotted(place_of(details)) for details in found if details["type"] != "extra_forbidden"}
        for details in found:
            _leave_out(content, place_of(details), form.stand_ins)
    return None, problems, unknown


def _innermost(error: ValidationError) -> list[ErrorDetails]:
    """The faults that no other explains: a list is too short for want of its unusable entry."""
    found = error.errors(include_url=False)
    places = {place_of(details) for details in found}
    return [
        details
        for details in found
        if not any(other[: len(place)] == place for place in (place_of(details),) for other in places - {place})
    ]


def _leave_out(content: dict[str, Any], place: Place, stand_ins: Mapping[str, Any]) -> None:
    """Remove an unusable option; one that is missing, or an entry of a list, gets a stand-in, else its section goes."""
    *way, last = place
    holder: Any = content
    for part in way:
        if isinstance(holder, list) != isinstance(part, int) or (isinstance(holder, dict) and part not in holder):
            return  # removed already, together with the section it stood in
        holder = holder[part]
    stand_in = stand_ins.get(".".join(part for part in place if isinstance(part, str)))
    if isinstance(holder, dict) and last in holder:
        del holder[last]
    elif isinstance(holder, dict) and stand_in is not None:
        holder[last] = copy.deepcopy(stand_in)
    elif isinstance(holder, list) and isinstance(stand_in, list):
        holder[int(last)] = copy.deepcopy(stand_in[0])
    elif way:
        _leave_out(content, tuple(way), stand_ins)


def _resolve_paths(content: dict[str, Any], base: Path, set_here: Sequence[Place], sources: tuple[Place, ...]) -> None:
    """Make paths absolute: inputs from the file's folder, those of --set and outputs from the current one."""
    for place, entry in (found for pattern in sources for found in _entries(content, pattern)):
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            path = _join(_folder((*place, "path"), base, set_here), entry["path"])
            if path.exists() or not _on_hub(entry["path"], entry.get("format", "auto")):
                entry["path"] = str(path)
    models = [(("model",), content.get("model")), *(found for key in _MODELS for found in _entries(content, key))]
    for place, model in models:
        if isinstance(model, dict) and isinstance(source := model.get("source"), str):
            path = _join(_folder((*place, "source"), base, set_here), source)
            if _names_a_path(source) or path.exists():
                model["source"] = str(path)
    root = content.get("root", RunConfig.model_fields["root"].default)
    if isinstance(root, str) and not is_remote(root):
        content["root"] = str(_join(Path.cwd(), root))
    registry = content.get("registry")
    if isinstance(registry, dict) and isinstance(uri := registry.get("tracking_uri"), str) and uri.startswith(_SQLITE):
        registry["tracking_uri"] = f"{_SQLITE}{_join(Path.cwd(), uri.removeprefix(_SQLITE))}"


def _read_schemas(content: dict[str, Any], base: Path, set_here: Sequence[Place]) -> None:
    """Put the JSON schemas that rewards name by path into the options, so that a run needs no file to be resumed.

    A path without a schema behind it stays, for the checks to report.
    """
    for place, entry in _entries(content, ("reward",)):
        if isinstance(entry, dict) and entry.get("kind") == "json_schema" and isinstance(entry.get("path"), str):
            file = _join(_folder((*place, "path"), base, set_here), entry["path"])
            schema = _json_object(file)
            if schema is not None and "definition" not in entry:
                entry["definition"] = schema
                del entry["path"]


def _json_object(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _entries(value: Any, pattern: Place, place: Place = ()) -> list[tuple[Place, Any]]:
    """Entries of the lists at a pattern, as far as they are there."""
    if not pattern:
        return [((*place, i), item) for i, item in enumerate(value)] if isinstance(value, list) else []
    first, rest = pattern[0], pattern[1:]
    if first == "*":
        items = list(enumerate(value)) if isinstance(value, list) else []
        return [found for i, item in items for found in _entries(item, rest, (*place, i))]
    return _entries(value.get(first), rest, (*place, first)) if isinstance(value, dict) else []


def _folder(place: Place, base: Path, set_here: Sequence[Place]) -> Path:
    return Path.cwd() if any(place[: len(given)] == given for given in set_here) else base


def _join(folder: Path, path: str) -> Path:
    return folder / os.path.expanduser(path)  # leaves an unknown user as it is


def _names_a_path(source: str) -> bool:
    return source.startswith(("/", "./", "../", "~")) or source.endswith(".gguf")


def _on_hub(path: str, format: Any) -> bool:
    """Whether a data path that is not there names a data set of the Hub."""
    if format != "auto":
        return bool(format == "hub")
    try:
        return source_format(DataSource(path=path)) == "hub"
    except DataError:
        return False


_RUN = Form(
    RunConfig,
    _SOURCES,
    _STAND_INS,
    lambda config, unknown, elsewhere: check_config(config, unknown, elsewhere=elsewhere),
    _named_sources,
    _named_models,
)
