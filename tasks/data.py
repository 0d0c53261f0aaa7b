"""Data of a run: from configured sources to the committed step `data/`, which everything later reads."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import RunConfig
from engine.data.completions import Example, prepare_sft
from engine.data.examplefile import save_examples
from engine.data.prepare import Prepared, prepare
from engine.data.promptfile import save_prompts
from engine.data.templating import load_tokenizer
from engine.errors import ConfigError, DataError, Problem
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
    """Everything that a run reads, prepared, with the content hashes that go into its digest."""

    prepared: Prepared
    examples: list[Example]
    card: dict[str, Any]
    fingerprints: dict[str, str]


def start_run(config: RunConfig, run_key: str | None = None) -> RunRef:
    """Make a run, or continue the one of this key: model and data checked, lease taken, data committed, attempt begun.

    Starts no worker. Raises ConfigError, DataError or StoreError before anything heavy, and before anything is written
    unless the run exists.
    """
    base = source_of(config)
    tokenizer = load_tokenizer(str(base), config.model.chat_template)
    content = _prepare(config, tokenizer)
    source = with_template(base, tokenizer, config)
    fingerprints = content.fingerprints | {"model": model_fingerprint(source, config)}
    run = create_run(config, run_key or new_run_key(config.name), source, fingerprints)
    ref = remember(run)
    begin_attempt_of(ref)
    if run.store.committed(STEP) is None:
        _commit(run.store, content)
    return ref


@durable(STEP)
def prepare_data(run: RunRef) -> StepRef:
    """The committed data of a run, made again from its sources if it was lost. Raises DataError if they have changed."""
    opened_run = opened(run)
    store, config = opened_run.store, opened_run.config
    if done := store.committed(STEP):
        return done
    content = _prepare(config, load_tokenizer(str(opened_run.source), config.model.chat_template))
    recorded = read_record(store.folder)["fingerprints"]
    problems = [
        Problem(name, digest[:12], f"the run was made with {recorded.get(name, 'nothing')[:12]}; restore the files")
        for name, digest in content.fingerprints.items()
        if recorded.get(name) != digest
    ]
    if problems:
        raise DataError("The prepared data is gone, and its sources have changed since.", problems=problems)
    return _commit(store, content)


def _prepare(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> _Content:
    prepared = prepare(
        config.data,
        tokenizer,
        needs_answer=config.needs_answer,
        seed=config.seed,
        suites=config.evaluation.suites,
    )
    _check_sizes(config, prepared)
    card = prepared.report.to_json() | {"train_rows": len(prepared.train), "eval_rows": len(prepared.eval)}
    if config.sft is None:
        return _Content(prepared, [], card, prepared.fingerprints)
    examples, report = prepare_sft(
        config.sft.data or config.data.train,
        config.data,
        tokenizer,
        max_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        held_out=[*prepared.eval, *(prompt for suite in prepared.suites.values() for prompt in suite)],
    )
    card = card | {"sft": report.to_json(), "sft_rows": len(examples)}
    return _Content(prepared, examples, card, prepared.fingerprints | {"data/sft": _examples_fingerprint(examples)})


def _check_sizes(config: RunConfig, prepared: Prepared) -> None:
    """Raise ConfigError if an iteration needs more prompts than there are, or there is nothing to evaluate on."""
    problems = []
    wanted, rows = config.train.prompts_per_iteration, len(prepared.train)
    if wanted > rows:
        remedy = f"an iteration takes {wanted} prompts, and the training data has {rows} rows; use at most {rows}, or more data"
        problems.append(Problem("train.prompts_per_iteration", wanted, remedy))
    if not prepared.eval and any(not suite.data for suite in config.evaluation.suites):
        remedy = f"no evaluation rows are left ({rows} training rows); give data.eval, or raise data.eval_fraction"
        problems.append(Problem("data.eval", len(prepared.eval), remedy))
    if problems:
        raise ConfigError("The configuration does not fit the data.", problems=problems)


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
