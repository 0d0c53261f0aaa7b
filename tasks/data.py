"""Data of a run: from configured sources to the committed step `data/`, which everything later reads."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import RunConfig, config_digest
from engine.data.completions import Example
from engine.data.examplefile import save_examples
from engine.data.prepare import Prepared
from engine.data.promptfile import save_prompts
from engine.errors import DataError, Problem
from engine.loading import refused
from engine.preflight import look_at_data, require_room
from engine.remote import require_place
from engine.remote_store import bring_run
from engine.runs import create_run, new_run_key, read_record, run_folder
from engine.store import StepRef, Store
from tasks.attempts import begin_attempt_of
from tasks.models import folder_fingerprint, model_fingerprint, source_of, with_template
from tasks.refs import RunRef, durable, opened, remember
from tasks.scoring_models import scoring_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP = "data"


@dataclass(frozen=True)
class _Content:
    """Everything that a run reads, prepared, with the content hashes that go into its digest."""

    tokenizer: "PreTrainedTokenizerBase"
    prepared: Prepared
    examples: list[Example]
    card: dict[str, Any]
    fingerprints: dict[str, str]


@dataclass(frozen=True)
class Planned:
    """A run that could be made: its configuration and all that it reads, prepared; nothing is written yet."""

    config: RunConfig
    source: Path
    content: _Content
    fingerprints: dict[str, str]
    models: dict[str, Path]

    @property
    def digest(self) -> str:
        """What tells runs with equal results from others: options, data and base model."""
        return config_digest(self.config, self.fingerprints)


def plan_run(config: RunConfig) -> Planned:
    """Model and data of a configuration, checked and read. Raises ConfigError before anything heavy."""
    require_place(config.root)
    base = source_of(config)
    content = _prepare(config, base)
    source = with_template(base, content.tokenizer, config)
    models = scoring_models(config, content.tokenizer)
    fingerprints = content.fingerprints | {"model": model_fingerprint(source, config)}
    fingerprints |= {key: folder_fingerprint(folder) for key, folder in models.items()}
    return Planned(config, source, content, fingerprints, models)


def start_run(config: RunConfig, run_key: str | None = None) -> RunRef:
    """Make a run, or continue the one of this key: model, data and free disk checked, lease taken, data committed, attempt begun.

    Starts no worker. Raises ConfigError or StoreError before anything heavy, and before anything is written
    unless the run exists.
    """
    return start_planned(plan_run(config), run_key)


def start_planned(plan: Planned, run_key: str | None = None) -> RunRef:
    """The same for a run whose model and data have been read."""
    config, key = plan.config, run_key or new_run_key(plan.config.name)
    if not bring_run(run_folder(config.root, key)):
        require_room(config, plan.source)
    run = create_run(config, key, plan.source, plan.fingerprints, plan.models)
    ref = remember(run)
    begin_attempt_of(ref)
    if run.store.committed(STEP) is None:
        _commit(run.store, plan.content)
    return ref


@durable(STEP)
def prepare_data(run: RunRef) -> StepRef:
    """The committed data of a run, made again from its sources if it was lost. Raises DataError if they have changed."""
    opened_run = opened(run)
    store, config = opened_run.store, opened_run.config
    if done := store.committed(STEP):
        return done
    content = _prepare(config, opened_run.source)
    recorded = read_record(store.folder)["fingerprints"]
    problems = [
        Problem(name, digest[:12], f"the run was made with {recorded.get(name, 'nothing')[:12]}; restore the files")
        for name, digest in content.fingerprints.items()
        if recorded.get(name) != digest
    ]
    if problems:
        raise DataError("The prepared data is gone, and its sources have changed since.", problems=problems)
    return _commit(store, content)


def _prepare(config: RunConfig, source: Path) -> _Content:
    findings = look_at_data(config, source)
    if not findings.check.ok:
        raise refused(findings.check.problems)
    assert findings.tokenizer is not None, "a folder with a config.json has a tokenizer or a problem"
    prepared, examples = findings.prepared, findings.examples
    card = prepared.report.to_json() | {"train_rows": len(prepared.train), "eval_rows": len(prepared.eval)}
    fingerprints = prepared.fingerprints
    if findings.sft_report is not None:
        card |= {"sft": findings.sft_report.to_json(), "sft_rows": len(examples)}
        fingerprints = fingerprints | {"data/sft": _examples_fingerprint(examples)}
    return _Content(findings.tokenizer, prepared, examples, card, fingerprints)


def _commit(store: Store, content: _Content) -> StepRef:
    with store.commit(STEP) as draft:
        save_prompts(content.prepared.train, draft.folder / "train.parquet")
        save_prompts(content.prepared.eval, draft.folder / "eval.parquet")
        for name, prompts in content.prepared.suites.items():
            save_prompts(prompts, draft.folder / f"suite-{name}.parquet")
        if content.examples:
            save_examples(content.examples, draft.folder / "sft.parquet")
        _write_json(content.card, draft.folder / "data_card.json")
        draft.facts = {
            name: content.card[name] for name in ("train_rows", "eval_rows", "sft_rows") if name in content.card
        }
    return draft.ref


def _examples_fingerprint(examples: list[Example]) -> str:
    total = hashlib.sha256()
    for example in examples:
        total.update(json.dumps([example.prompt_length, example.input_ids]).encode())
    return total.hexdigest()


def _write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=1))
