"""What the registry holds already: a run that would repeat a registered one need not be made."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from engine.config import RunConfig
from tasks.mlflow_store import connect, patiently

if TYPE_CHECKING:
    from mlflow import MlflowClient

DIGEST_TAG = "config_digest"  # of a version; equal for runs of equal options, data and base model


@dataclass(frozen=True)
class Registered:
    """A version that an earlier run of the same options, data and base model made, and what the gate said of it."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_key: str
    verdict: str
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        """Why nothing is done, for people."""
        model = f"models:/{self.name}/{self.version} ({', '.join(self.aliases) or 'no alias'})"
        return f"{model} was made by run {self.run_key} from the same options, data and base model: nothing was done."


def registered_before(config: RunConfig, digest: str, run_key: str) -> Registered | None:
    """The newest judged version that another run of this digest registered; None = the run has to be made."""
    if config.registry is None:
        return None
    client = connect(config.root, config.registry.tracking_uri)
    name = config.registry.model
    found = patiently(lambda: client.search_model_versions(f"name = '{name}' and tags.{DIGEST_TAG} = '{digest}'"))
    judged = [item for item in found if "verdict" in item.tags and item.tags["run_key"] != run_key]
    if not judged:
        return None
    newest = max(judged, key=lambda item: int(item.version))
    aliases = tuple(aliases_of(client, name, newest.version))
    tags = newest.tags
    return Registered(name, int(newest.version), aliases, tags["run_key"], tags["verdict"], _reasons(tags["reasons"]))


def nothing_to_do(found: Registered) -> dict[str, Any]:
    """The end of a flow run that made no run: a state of its own that holds a result of the usual shape, and a note on its page.

    To whoever calls the flow, Prefect hands the result inside the state that the flow returns.
    """
    create_markdown_artifact(markdown=f"## Nothing was done\n\n{found.text}\n", key="already-registered")
    result = {
        "status": "completed",
        "run_key": found.run_key,
        "run_dir": None,
        "iterations_planned": 0,
        "iterations_done": 0,
        "iterations_reused": 0,
        "seconds": 0.0,
        "weights_sha256": None,
        "metrics": {},
        "evaluation": {},
        "gate": {"verdict": found.verdict, "reasons": list(found.reasons)},
        "model": {"name": found.name, "version": found.version, "aliases": list(found.aliases)},
    }
    state: State[dict[str, Any]] = Completed(name="AlreadyRegistered", message=found.text, data=result)
    return cast("dict[str, Any]", state)


def aliases_of(client: "MlflowClient", name: str, version: str) -> list[str]:
    """Aliases that point to a version."""
    aliases = patiently(lambda: client.get_registered_model(name)).aliases
    return sorted(alias for alias, target in aliases.items() if str(target) == str(version))


def _reasons(tag: str) -> tuple[str, ...]:
    """The gate's reasons; the tag is cut where they were very long, and is one reason then."""
    try:
        return tuple(json.loads(tag))
    except ValueError:
        return (tag,)
