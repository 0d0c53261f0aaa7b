"""Data of a run on fixed rows: from configured sources to the committed step `data/`, which everything later reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.data.completions import Example, Preference
from engine.data.examplefile import save_examples
from engine.data.offline import OfflineRows
from engine.data.pairfile import save_pairs
from engine.errors import DataError, Problem
from engine.loading import refused
from engine.offline_preflight import look_at_offline_data
from engine.offlineconfig import OfflineConfig
from engine.remote import require_place
from engine.runs import create_run, new_run_key, read_record
from engine.store import StepRef, Store
from tasks.attempts import begin_attempt_of
from tasks.models import model_fingerprint, source_of, with_template
from tasks.refs import RunRef, durable, opened, remember

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP = "data"


@dataclass(frozen=True)
class _Content:
    """Everything that a run reads, prepared, and what the data card says of it."""

    tokenizer: "PreTrainedTokenizerBase"
    rows: OfflineRows
    card: dict[str, Any]


def start_offline_run(config: OfflineConfig, run_key: str | None = None) -> RunRef:
    """Make a run, or continue the one of this key: model and data checked, lease taken, data committed, attempt begun.

    Starts no worker. Raises ConfigError or StoreError before anything heavy.
    """
    require_place(config.root)
    base = source_of(config)
    content = _prepare(config, base)
    source = with_template(base, content.tokenizer, config)
    fingerprints = content.rows.fingerprints | {"model": model_fingerprint(source, config)}
    run = create_run(config, run_key or new_run_key(config.name), source, fingerprints)
    ref = remember(run)
    begin_attempt_of(ref)
    if run.store.committed(STEP) is None:
        _commit(run.store, content)
    return ref


@durable(STEP)
def prepare_rows(run: RunRef) -> StepRef:
    """The committed data of a run, made again from its sources if it was lost. Raises DataError if they have changed."""
    opened_run = opened(run)
    if done := opened_run.store.committed(STEP):
        return done
    content = _prepare(opened_run.config, opened_run.source)
    recorded = read_record(opened_run.store.folder)["fingerprints"]
    problems = [
        Problem(name, digest[:12], f"the run was made with {recorded.get(name, 'nothing')[:12]}; restore the files")
        for name, digest in content.rows.fingerprints.items()
        if recorded.get(name) != digest
    ]
    if problems:
        raise DataError("The prepared data is gone, and its sources have changed since.", problems=problems)
    return _commit(opened_run.store, content)


def _prepare(config: OfflineConfig, source: Path) -> _Content:
    findings = look_at_offline_data(config, source)
    if not findings.check.ok:
        raise refused(findings.check.problems)
    assert findings.tokenizer is not None, "a folder with a config.json has a tokenizer or a problem"
    rows = findings.rows
    card = rows.report.to_json() | {"train_rows": len(rows.train), "eval_rows": len(rows.eval)}
    return _Content(findings.tokenizer, rows, card)


def _commit(store: Store, content: _Content) -> StepRef:
    with store.commit(STEP) as draft:
        _save(content.rows.train, draft.folder / "train.parquet")
        _save(content.rows.eval, draft.folder / "eval.parquet")
        (draft.folder / "data_card.json").write_text(json.dumps(content.card, indent=1))
        draft.facts = {name: content.card[name] for name in ("train_rows", "eval_rows")}
    return draft.ref


def _save(rows: Sequence[Example | Preference], file: Path) -> None:
    """Rows of one split, all examples or all pairs."""
    if examples := [row for row in rows if isinstance(row, Example)]:
        save_examples(examples, file)
    else:
        save_pairs([row for row in rows if isinstance(row, Preference)], file)
