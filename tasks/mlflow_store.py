"""Where MLflow keeps runs and models: address, client, patience with a locked SQLite file, download of registered models."""

import fcntl
import hashlib
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.errors import ConfigError, Problem, TransientError
from engine.roots import is_remote

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK_TIMEOUT_S = 60.0  # for a write lock that another process holds, besides SQLite's own 20 s
_MODEL = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/]+)|/(?P<version>\d+))")

T = TypeVar("T")


def address(root: str, tracking_uri: str | None) -> str:
    """The configured MLflow server, or the SQLite file of the run root. Raises ConfigError if that is a URL."""
    if tracking_uri is None and is_remote(root):
        remedy = "MLflow's SQLite file cannot lie on object storage: give --tracking-uri, or registry.tracking_uri"
        raise ConfigError("There is no place for MLflow.", problems=[Problem("registry.tracking_uri", None, remedy)])
    return tracking_uri or f"sqlite:///{Path(root).absolute() / 'mlflow.db'}"


def artifact_root(root: str, tracking_uri: str | None) -> str | None:
    """Where a new experiment's files go; None = a configured server decides."""
    return None if tracking_uri else (Path(root).absolute() / "mlartifacts").as_uri()


def connect(root: str, tracking_uri: str | None) -> "MlflowClient":
    """A client whose tables exist; MLflow's own functions (`mlflow.*`) use the same address from now on.

    Raises TransientError if the server or the file cannot be used.
    """
    import mlflow

    uri = address(root, tracking_uri)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    client = mlflow.MlflowClient(uri, uri)
    if tracking_uri is None:
        Path(root).mkdir(parents=True, exist_ok=True)
        with (Path(root) / ".mlflow.lock").open("w") as lock:  # two processes must not make the tables at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            patiently(lambda: client.search_experiments(max_results=1))
    else:
        patiently(lambda: client.search_experiments(max_results=1))
    return client


def patiently(action: Callable[[], T]) -> T:
    """The action's result, tried again while another process has the database locked. It must be harmless to repeat.

    Raises TransientError for everything else that MLflow or its database refuses.
    """
    from mlflow.exceptions import MlflowException

    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return action()
        except MlflowException as error:
            if "database is locked" not in str(error) or time.monotonic() > deadline:
                raise TransientError(
                    f"MLflow refused: {error}",
                    remedy="Check the tracking server and resume the run: nothing is done twice.",
                ) from error
        time.sleep(random.uniform(0.05, 0.3))


def download_model(source: str, root: str, tracking_uri: str | None, cache: Path) -> Path:
    """Local Hugging Face folder of a registered model. Raises ConfigError if there is no such version or alias."""
    match = _MODEL.fullmatch(source)
    if match is None:
        raise _unusable(source, "write models:/NAME@ALIAS or models:/NAME/VERSION")
    client = connect(root, tracking_uri)
    version = match["version"] or _version_of(client, source, match["name"], match["alias"])
    target = cache / f"registered-{match['name']}-{version}-{_identity(client, source, match['name'], version)}"
    if not target.exists():
        _download(source, f"models:/{match['name']}/{version}", target)
    return target


def alias_version(client: "MlflowClient", name: str, alias: str) -> str | None:
    """Version that an alias points to, existing or not; None if the alias (or the model) does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return str(aliases[alias]) if alias in aliases else None


def _identity(client: "MlflowClient", source: str, name: str, version: str) -> str:
    """Tells a version from one of the same name and number in another registry, or registered after a deletion."""
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_model_version(name, version)
    except MlflowException as error:
        raise _unusable(source, f"MLflow has no such model: {error}") from error
    text = f"{client.tracking_uri} {found.creation_timestamp} {found.source}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _version_of(client: "MlflowClient", source: str, name: str, alias: str) -> str:
    version = patiently(lambda: alias_version(client, name, alias))
    if version is None:
        raise _unusable(source, f"model {name} has no alias {alias} in {client.tracking_uri}")
    return version


def _download(source: str, uri: str, target: Path) -> None:
    """The weights folder of a transformers model, its tokenizer put back beside the weights where it was saved apart."""
    import mlflow
    from mlflow.exceptions import MlflowException

    new = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    new.mkdir(parents=True)
    try:
        fetched = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(new)))
        if not (fetched / "model" / "config.json").is_file():
            raise _unusable(source, "it is no model of MLflow's transformers flavour")
        model = fetched / "model"
        if (tokenizer := fetched / "components" / "tokenizer").is_dir():
            shutil.copytree(tokenizer, model, dirs_exist_ok=True)
        model.rename(target)
    except MlflowException as error:
        raise _unusable(source, f"MLflow has no such model: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _unusable(source: str, found: str) -> ConfigError:
    return ConfigError("The model cannot be used.", problems=[Problem("model.source", source, found)])
