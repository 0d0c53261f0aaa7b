"""`hybridflow data check`: what a data file, or the data of a configuration, holds and what is wrong with it."""

from pathlib import Path
from typing import Any

from engine.backends.imports import without
from engine.commands.outcome import Outcome
from engine.config import RunConfig
from engine.data.check import DataCheck, check_file
from engine.offline_loading import is_offline
from engine.preflight import look_at_data

_CONFIGS = {".yaml", ".yml"}
_SHOWN = 5  # lines of a file that are left out, in the text for people


def check(source: str, overrides: list[str]) -> Outcome:
    """The report of one file, or of everything that a configuration reads; exit code 2 where a run would refuse it."""
    if Path(source).suffix in _CONFIGS and is_offline(source):
        from engine.commands.offline import checked_rows

        found = checked_rows(source, overrides).check
    elif Path(source).suffix in _CONFIGS:
        from engine.commands.running import checked

        config = checked(source, overrides)
        found = _of_config(config)
    else:
        found = check_file(source)
    content = {"status": "completed" if found.ok else "failed"} | found.to_json()
    return Outcome(content, _text(found, content), 0 if found.ok else 2)


def _of_config(config: RunConfig) -> DataCheck:
    local = Path(config.model.source)
    if local.is_dir():
        with without("torch", "sklearn", "scipy"):  # the tokenizer alone loads in a third of the time
            return look_at_data(config, local).check
    from tasks.models import source_of

    return look_at_data(config, source_of(config)).check


def _text(found: DataCheck, content: dict[str, Any]) -> str:
    lines = []
    for file in content["files"]:
        lines.append(f"{file['path']}: {file['kept']} of {file['rows']} rows kept")
        lines += [f"  line {item['line']}: {item['reason']}" for item in file["problems"][:_SHOWN]]
        if len(file["problems"]) > _SHOWN:
            lines.append(f"  ... and {len(file['problems']) - _SHOWN} more")
    lines += [f"column {name}: {types}" for name, types in content["columns"].items()]
    lines.append(f"duplicates: {content['duplicates']}, rows that are also evaluation rows: {len(content['overlap'])}")
    if content["truncated"] or content["without_labels"] or content["identical"]:
        lines.append(
            f"completions cut: {content['truncated']}; dropped because nothing to learn was left: "
            f"{content['without_labels']}, because both completions were the same: {content['identical']}"
        )
    tokens = content["prompt_tokens"]
    if tokens["max"] is not None:
        lines.append(
            f"prompt tokens: {tokens['min']} to {tokens['max']}, median {tokens['p50']}, 95 % below {tokens['p95']}"
        )
    lines += [f"problem: {problem}" for problem in found.problems]
    return "\n".join(lines)
