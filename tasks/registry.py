"""Model registry: a run's final policy becomes one version with lineage; aliases say what it is good for.

challenger = the newest candidate, champion = what consumers load, previous = the champion before.
"""

import importlib.metadata
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from engine.errors import ConfigError, Problem, StoreError
from engine.offlineconfig import LANGUAGE_MODELS, AnyConfig, OfflineConfig
from engine.runs import Run, policy_folder
from engine.store import StepRef
from tasks.gate import Verdict, verdict_of
from tasks.mlflow_store import alias_version, connect, patiently
from tasks.refs import RunRef, durable, opened
from tasks.registered import DIGEST_TAG, aliases_of
from tasks.tracking import Tracker, tracker_for

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
SOURCE_TAG = "manifest_sha256"  # of the step whose weights a version holds; finds the version again after a kill
SCORE_TAG = "score."  # + suite
_PINNED = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "jinja2")


def champion_obstacle(config: AnyConfig) -> str | None:
    """Why a candidate cannot be compared with the registry's champion; None if it can, or if there is no champion."""
    if config.registry is None:
        return None
    client = connect(config.root, config.registry.tracking_uri)
    name = config.registry.model
    version = patiently(lambda: alias_version(client, name, CHAMPION))
    if version is None:
        return None
    tags = _tags(client, name, version)
    if tags is None:
        return f"alias {CHAMPION} of {name} points to version {version}, which does not exist"
    if f"{SCORE_TAG}{config.gate.suite}" not in tags:
        return f"{CHAMPION} of {name}, version {version}, has no score of suite {config.gate.suite}"
    return None


@durable("registration")
def register_policy(run: RunRef, gate: StepRef, policy: StepRef, evaluation: StepRef) -> StepRef:
    """Register the final policy once, with the verdict; make it champion if it passed. facts: {"name", "version", "aliases"}.

    Safe to repeat after a kill at any point: the version is found again by the hash of the policy's manifest, and the alias
    moves only after the verdict is stored.
    """
    opened_run = opened(run)
    if done := opened_run.store.committed("registration", parent=gate):
        return done
    assert opened_run.config.registry is not None
    name, verdict = opened_run.config.registry.model, verdict_of(run, gate)
    tracker = tracker_for(run)
    version = _version_once(tracker, name, policy, _version_tags(opened_run, policy, evaluation))
    client = tracker.client
    patiently(lambda: client.set_registered_model_alias(name, CHALLENGER, version))
    _store_verdict(client, name, version, verdict)
    if verdict.verdict == "promote":
        make_champion(client, name, version)
    with opened_run.store.commit("registration", parent=gate) as draft:
        draft.facts = {"name": name, "version": int(version), "aliases": aliases_of(client, name, version)}
    return draft.ref


def promote(name: str, version: str | None, reason: str, root: str, tracking_uri: str | None) -> dict[str, Any]:
    """Make a version champion by hand (None = the challenger), with the reason kept as a tag. Raises ConfigError."""
    client = connect(root, tracking_uri)
    require_model(client, name)
    chosen = version or _required_alias(client, name, CHALLENGER)
    return _move(client, name, chosen, "promoted", reason)


def rollback(name: str, version: str | None, reason: str, root: str, tracking_uri: str | None) -> dict[str, Any]:
    """Make an earlier version champion again (None = the previous one), with the reason kept as a tag. Raises ConfigError."""
    client = connect(root, tracking_uri)
    require_model(client, name)
    chosen = version or _required_alias(client, name, PREVIOUS)
    return _move(client, name, chosen, "rolled_back_to", reason)


def require_model(client: "MlflowClient", name: str) -> None:
    """Raise ConfigError, with the names that there are, unless a model of this name is registered."""
    known = [model.name for model in patiently(client.search_registered_models)]
    if name not in known:
        remedy = f"no such model in {client.tracking_uri}; registered: {', '.join(known) or 'none'}"
        raise ConfigError("There is no such model.", problems=[Problem("name", name, remedy)])


def make_champion(client: "MlflowClient", name: str, version: str) -> None:
    """Point `champion` at a version and `previous` at the one before it."""
    old = patiently(lambda: alias_version(client, name, CHAMPION))
    if old == version:
        return
    if old is not None:
        patiently(lambda: client.set_registered_model_alias(name, PREVIOUS, old))
    patiently(lambda: client.set_registered_model_alias(name, CHAMPION, version))


def pinned_requirements() -> list[str]:
    """What a consumer needs to load the model, in the versions that made it; build labels such as +cpu are left out."""
    return [f"{name}=={Version(importlib.metadata.version(name)).public}" for name in _PINNED]


def task_of(config: AnyConfig) -> str:
    """What transformers' pipeline does with the model of a run."""
    if isinstance(config, OfflineConfig) and config.objective.name not in LANGUAGE_MODELS:
        return "text-classification"
    return "text-generation"


def signature(config: AnyConfig) -> "ModelSignature":
    """Text in, text or a label with its score out; given explicitly because MLflow would run the model to find out."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    text = Schema([ColSpec(DataType.string)])
    if task_of(config) == "text-classification":
        scored = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
        return ModelSignature(inputs=text, outputs=scored)
    longest = config.data.max_tokens if isinstance(config, OfflineConfig) else config.rollout.max_response_tokens
    params = [
        ParamSpec("max_new_tokens", DataType.long, longest),
        ParamSpec("do_sample", DataType.boolean, False),  # greedy by default
    ]
    return ModelSignature(inputs=text, outputs=text, params=ParamSchema(params))


def _version_once(tracker: Tracker, name: str, policy: StepRef, tags: dict[str, str]) -> str:
    client = tracker.client
    _make_model(client, name)
    found = patiently(
        lambda: client.search_model_versions(f"name = '{name}' and tags.{SOURCE_TAG} = '{policy.manifest_sha256}'")
    )
    if found:
        return str(found[0].version)
    model_id = _logged_model(tracker, policy)
    made = patiently(
        lambda: client.create_model_version(name, f"models:/{model_id}", tracker.run_id, tags=tags, model_id=model_id)
    )
    return str(made.version)


def _make_model(client: "MlflowClient", name: str) -> None:
    if not patiently(lambda: client.search_registered_models(f"name = '{name}'")):
        patiently(lambda: client.create_registered_model(name))


def _logged_model(tracker: Tracker, policy: StepRef) -> str:
    """Id of the policy's files in MLflow, uploaded unless an earlier attempt finished that."""
    import mlflow

    folder = policy_folder(tracker.run, policy)
    _check_template(tracker.run, folder)
    experiment = tracker.client.get_run(tracker.run_id).info.experiment_id
    filter_ = f"tags.{SOURCE_TAG} = '{policy.manifest_sha256}'"
    for model in tracker.client.search_logged_models([experiment], filter_string=filter_):
        if model.status == "READY":
            return str(model.model_id)
    with _without_hub(), mlflow.start_run(run_id=tracker.run_id):
        logged = mlflow.transformers.log_model(
            str(folder),
            name="policy",
            task=task_of(tracker.run.config),
            signature=signature(tracker.run.config),
            pip_requirements=pinned_requirements(),
            tags={SOURCE_TAG: policy.manifest_sha256},
        )
    return str(logged.model_id)


@contextmanager
def _without_hub() -> Iterator[None]:
    """Nothing that is logged from a folder needs the Hub: without a network each look at it waits for a timeout, and
    MLflow warns about the model card and licence that it does not find there."""
    from huggingface_hub import constants

    logger = logging.getLogger("mlflow.transformers")
    before = constants.HF_HUB_OFFLINE, logger.level
    constants.HF_HUB_OFFLINE = True
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        logger.setLevel(before[1])


def _check_template(run: Run, folder: Path) -> None:
    """Raise StoreError if the base model had a chat template and the trained one has lost or changed it."""
    from transformers import AutoTokenizer

    before, after = (AutoTokenizer.from_pretrained(str(place)).chat_template for place in (run.source, folder))
    if before != after:
        raise StoreError(
            "The trained model does not have the chat template of its base model.",
            path=str(folder),
            base=str(run.source),
            remedy="It is not registered. The saved tokenizer is wrong: report this with both folders.",
        )


def _version_tags(run: Run, policy: StepRef, evaluation: StepRef) -> dict[str, str]:
    facts = run.store.manifest(policy).facts
    suites = run.store.manifest(evaluation).facts["suites"]
    return {
        SOURCE_TAG: policy.manifest_sha256,
        "run_key": run.key,
        DIGEST_TAG: run.store.config_digest,
        "weights_sha256": facts["sha256"],
        "seed": str(run.config.seed),
        **{
            f"{SCORE_TAG}{name}": str(report["score_mean"])
            for name, report in suites.items()
            if report["score_mean"] is not None
        },
    }


def _store_verdict(client: "MlflowClient", name: str, version: str, verdict: Verdict) -> None:
    tags = {"verdict": verdict.verdict, "reasons": json.dumps(verdict.reasons)[:5000]}
    for key, value in tags.items():
        patiently(lambda key=key, value=value: client.set_model_version_tag(name, version, key, value))  # type: ignore[misc]


def _move(client: "MlflowClient", name: str, version: str, event: str, reason: str) -> dict[str, Any]:
    if _tags(client, name, version) is None:
        known = (
            ", ".join(sorted(str(item.version) for item in client.search_model_versions(f"name = '{name}'"))) or "none"
        )
        problem = Problem("version", version, f"model {name} has no such version; it has: {known}")
        raise ConfigError("No alias was moved.", problems=[problem])
    note = {"event": event, "reason": reason, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    patiently(lambda: client.set_model_version_tag(name, version, event, json.dumps(note)))
    make_champion(client, name, version)
    return {"name": name, "version": int(version), "aliases": aliases_of(client, name, version), "reason": reason}


def _required_alias(client: "MlflowClient", name: str, alias: str) -> str:
    version = patiently(lambda: alias_version(client, name, alias))
    if version is None:
        problem = Problem("name", name, f"it has no alias {alias} in {client.tracking_uri}; give a version")
        raise ConfigError("No alias was moved.", problems=[problem])
    return version


def _tags(client: "MlflowClient", name: str, version: str) -> dict[str, str] | None:
    """Tags of a version; None if it does not exist."""
    found = patiently(lambda: client.search_model_versions(f"name = '{name}' and version_number = {int(version)}"))
    return dict(found[0].tags) if found else None
