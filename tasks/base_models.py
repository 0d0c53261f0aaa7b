"""The models that a run was made with, on a machine that does not have them where run.json says."""

from dataclasses import replace
from typing import Any

from engine.config import RunConfig
from engine.data.templating import load_tokenizer
from engine.errors import ConfigError, Problem
from engine.roots import is_remote
from engine.runs import Run, read_record
from tasks.models import folder_fingerprint, model_fingerprint, source_of, with_template
from tasks.scoring_models import scoring_models


def found_here(run: Run[Any]) -> Run[Any]:
    """The run with its models in the folders of this machine, looked for as when it was made; only one of a URL can need that.

    Raises ConfigError where a model is not to be found, or is not the one that the run was made with.
    """
    here = [(folder / "config.json").is_file() for folder in (run.source, *run.models.values())]
    if not is_remote(run.root) or all(here):
        return run
    base = source_of(run.config)
    tokenizer = load_tokenizer(str(base), run.config.model.chat_template)
    source = with_template(base, tokenizer, run.config)
    models = scoring_models(run.config, tokenizer) if isinstance(run.config, RunConfig) else {}
    found = {"model": model_fingerprint(source, run.config)}
    found |= {key: folder_fingerprint(folder) for key, folder in models.items()}
    recorded = read_record(run.store.folder)["fingerprints"]
    problems = [
        Problem(key, digest[:12], f"the run was made with {recorded.get(key, 'nothing')[:12]}; bring that model here")
        for key, digest in found.items()
        if recorded.get(key) != digest
    ]
    if problems:
        raise ConfigError("This machine has other models than the run was made with.", problems=problems)
    return replace(run, source=source, models=models)
