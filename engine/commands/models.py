"""`hybridflow promote`, `rollback` and `models`: the registry, without starting anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.commands.outcome import Outcome


@dataclass(frozen=True)
class Registry:
    """Where registered models are: the SQLite file of a run root, or an MLflow address."""

    root: str
    tracking_uri: str | None


def promote(where: Registry, name: str, version: str | None, reason: str) -> Outcome:
    """Make a version champion; None = the challenger."""
    from tasks import registry

    return _moved(registry.promote(name, version, reason, where.root, where.tracking_uri))


def rollback(where: Registry, name: str, version: str | None, reason: str) -> Outcome:
    """Make an earlier version champion again; None = the one before the present champion."""
    from tasks import registry

    return _moved(registry.rollback(name, version, reason, where.root, where.tracking_uri))


def list_models(where: Registry) -> Outcome:
    """Every registered model with its aliases."""
    from tasks.mlflow_store import address, connect, patiently

    client = connect(where.root, where.tracking_uri)
    found = patiently(client.search_registered_models)
    rows = [{"name": model.name, "aliases": _aliases(client, model.name)} for model in found]
    lines = [f"{row['name']:<32}{_aliases_text(row['aliases'])}" for row in rows]
    uri = address(where.root, where.tracking_uri)
    content = {"status": "completed", "tracking_uri": uri, "models": rows}
    return Outcome(content, "\n".join(lines or [f"no models in {uri}"]))


def show(where: Registry, name: str) -> Outcome:
    """Every version of a model, newest first, with its tags. Raises ConfigError if there is no such model."""
    from tasks.mlflow_store import connect, patiently
    from tasks.registry import require_model

    client = connect(where.root, where.tracking_uri)
    require_model(client, name)
    aliases = _aliases(client, name)
    found = patiently(lambda: client.search_model_versions(f"name = '{name}'"))
    rows = [
        {
            "version": int(item.version),
            "aliases": sorted(alias for alias, version in aliases.items() if version == int(item.version)),
            "created": item.creation_timestamp,
            "tags": dict(item.tags),
        }
        for item in sorted(found, key=lambda item: -int(item.version))
    ]
    lines = []
    for row in rows:
        lines.append(f"{name} version {row['version']}  {', '.join(row['aliases'])}".rstrip())
        lines += [f"  {key}: {value}" for key, value in sorted(row["tags"].items())]
    return Outcome({"status": "completed", "name": name, "aliases": aliases, "versions": rows}, "\n".join(lines))


def import_model(where: Registry, source: str, folder: str) -> Outcome:
    """A plain Hugging Face folder with the content of any source."""
    from tasks import models

    made = models.import_model(source, Path(folder), where.root, where.tracking_uri)
    return Outcome({"status": "completed", "source": source, "folder": str(made)}, f"{source} is now in {made}")


def _aliases(client: Any, name: str) -> dict[str, int]:
    """Alias -> version. Only the model itself tells; searches leave aliases out."""
    from tasks.mlflow_store import patiently

    found = patiently(lambda: client.get_registered_model(name)).aliases
    return {alias: int(version) for alias, version in sorted(found.items())}


def _aliases_text(aliases: dict[str, int]) -> str:
    return ", ".join(f"{alias} = {version}" for alias, version in aliases.items()) or "no alias"


def _moved(result: dict[str, Any]) -> Outcome:
    text = f"models:/{result['name']}/{result['version']} is now {', '.join(result['aliases'])}"
    return Outcome({"status": "completed"} | result, text)
