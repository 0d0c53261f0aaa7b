"""Model sources: whatever names a model becomes a local Hugging Face folder (config, weights, tokenizer, chat template)."""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, Problem, TransientError
from engine.gguf import convert_gguf
from engine.offlineconfig import AnyConfig
from engine.roots import local_root
from engine.runs import open_run, policy_folder
from engine.store import StepRef, Store, step_path
from tasks.mlflow_store import download_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_RUN = re.compile(r"runs:(?P<key>[^/]+)(/(?P<iteration>\d+))?")
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]  # no pickle
_WEIGHTS = "*.safetensors"


def resolve_source(source: str, root: str, tracking_uri: str | None = None) -> Path:
    """Local folder of a model: a folder, a .gguf file, `models:/NAME@ALIAS` or `/VERSION`, `runs:KEY[/ITERATION]`, a Hub id.

    What has to be converted or fetched is kept under {root}/.models. Raises ConfigError naming what was found instead.
    """
    cache = local_root(root) / ".models"
    path = Path(source).expanduser()
    if source.startswith("models:/"):
        return download_model(source, root, tracking_uri, cache)
    if source.startswith("runs:"):
        return _of_run(source, root)
    if path.suffix == ".gguf":
        return _from_gguf(path, cache)
    if path.is_dir():
        return _complete(path.absolute(), source)
    if _HUB_ID.fullmatch(source):
        return _complete(_from_hub(source), source)
    raise _unusable(source, "there is no such folder, and it is no Hub id either")


def import_model(source: str, folder: Path, root: str, tracking_uri: str | None = None) -> Path:
    """A copy of any source as a plain folder of its own. Raises ConfigError if `folder` holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = Problem("folder", str(folder), "it is a file, or a folder that is not empty; name a new one")
        raise ConfigError("The model is not imported over existing files.", problems=[problem])
    resolved = resolve_source(source, root, tracking_uri)
    return _made_once(folder, lambda new: _copy(resolved, new))


def source_of(config: AnyConfig) -> Path:
    """Local folder of a run's base model. Raises ConfigError if the run needs weights and there are none."""
    tracking_uri = config.registry.tracking_uri if config.registry else None
    folder = resolve_source(config.model.source, config.root, tracking_uri)
    if config.model.init == "pretrained" and not any(folder.glob(_WEIGHTS)):
        raise _unusable(
            config.model.source, f"{folder} has no {_WEIGHTS} file; convert the weights, or set model.init: random"
        )
    return folder


def with_template(source: Path, tokenizer: "PreTrainedTokenizerBase", config: AnyConfig) -> Path:
    """The folder itself, or one beside it whose tokenizer carries the configured chat template that the source lacks."""
    template = config.model.chat_template
    if template is None or (source / "chat_template.jinja").exists() or tokenizer.chat_template != template:
        return source
    name = hashlib.sha256(f"{source}\n{template}".encode()).hexdigest()[:16]

    def fill(new: Path) -> None:
        for file in _model_files(source):
            (new / file.name).symlink_to(file.resolve())
        for stale in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (new / stale).unlink(missing_ok=True)
        tokenizer.save_pretrained(str(new))

    return _made_once(local_root(config.root) / ".models" / f"templated-{name}", fill)


def model_fingerprint(folder: Path, config: AnyConfig) -> str:
    """sha256 over the architecture, the generation defaults and, where the run starts from them, the weights."""
    return folder_fingerprint(folder, weights=config.model.init == "pretrained")


def folder_fingerprint(folder: Path, *, weights: bool = True) -> str:
    """sha256 over a model's architecture, generation defaults and, if asked, weights."""
    names = ["config.json", "generation_config.json", *([_WEIGHTS] if weights else [])]
    total = hashlib.sha256()
    for file in sorted(file for name in names for file in folder.glob(name)):
        with file.open("rb") as stream:
            total.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _of_run(source: str, root: str) -> Path:
    match = _RUN.fullmatch(source)
    if match is None:
        raise _unusable(source, "write runs:RUN_KEY or runs:RUN_KEY/ITERATION")
    run = open_run(root, match["key"])
    step = _step_with_weights(run.store, source, match["iteration"])
    return policy_folder(run, step)


def _step_with_weights(store: Store, source: str, iteration: str | None) -> StepRef:
    kept = _kept(store)
    if iteration is None:
        step = kept[max(kept)] if kept else store.committed("start")
    else:
        step = store.committed("start") if int(iteration) == 0 else kept.get(int(iteration))
    if step is None:
        numbers = ", ".join(str(number) for number in sorted(kept)) or "none"
        raise _unusable(source, f"no such weights; iterations of {store.folder.name} with weights: {numbers}")
    return step


def _kept(store: Store) -> dict[int, StepRef]:
    """Iteration -> train step, of those whose weights are still there."""
    numbers = [int(folder.name) for folder in (store.folder / "iterations").glob("*") if folder.name.isdigit()]
    steps = {number: store.committed(step_path("train", number)) for number in numbers}
    return {
        number: ref
        for number, ref in steps.items()
        if ref and store.manifest(ref).facts["weights"] and not store.is_pruned(ref)
    }


def _from_gguf(file: Path, cache: Path) -> Path:
    if not file.is_file():
        raise _unusable(str(file), "there is no such file")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return _made_once(cache / f"{file.stem}-{digest[:16]}", lambda new: convert_gguf(file, new))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the Hub does not answer"
        raise _unusable(name, f"there is no such folder, and it is not in the Hub cache while {offline}") from error
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError) as error:
        raise _unusable(name, f"there is no such folder, and the Hub refuses it: {error}") from error
    except HfHubHTTPError as error:
        raise TransientError(f"The Hub failed while {name} was fetched: {error}", remedy="Try again later.") from error


def _complete(folder: Path, source: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    found = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) or "nothing"
    raise _unusable(source, f"{folder} is no model folder: it has no config.json (it holds {found})")


def _made_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, filled completely or not there at all; a second maker at the same time loses quietly."""
    if target.exists() and any(target.iterdir()):
        return target
    new = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    new.mkdir(parents=True)
    try:
        fill(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        new.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def _model_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in _FILES for file in folder.glob(pattern)})


def _copy(folder: Path, target: Path) -> None:
    for file in _model_files(folder):
        shutil.copy(file, target / file.name)


def _unusable(source: str, found: str) -> ConfigError:
    return ConfigError("The model cannot be used.", problems=[Problem("model.source", source, found)])
