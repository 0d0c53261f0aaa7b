"""Small real runs for tests: a random tiny model, a few additions, everything committed in a temporary root."""

from pathlib import Path
from typing import Any

from engine.config import RunConfig
from engine.data.completions import Example
from engine.data.examplefile import save_examples
from engine.data.prepare import Prompt
from engine.data.promptfile import save_prompts
from engine.runs import Run, create_run
from engine.store import StepRef
from tests.helpers.tiny import BOS, CHARACTERS, EOS, tiny_folder

FIRST_CHARACTER = 3  # id of CHARACTERS[0]


def encode(text: str) -> tuple[int, ...]:
    """Ids of a text, one per character."""
    return tuple(FIRST_CHARACTER + CHARACTERS.index(character) for character in text)


def addition(index: int) -> Prompt:
    """The index-th addition of one-digit numbers, whose answer is one digit."""
    left, right = index % 5, index // 5 % 5
    text = f"{left}+{right}="
    return Prompt(index, (BOS, *encode(text)), text, str(left + right), "addition", {}, "memory", index + 1)


def tiny_config(root: Path, source: Path, **sections: Any) -> RunConfig:
    """A few iterations on the tiny model, everything in this process: torch trains, Hugging Face generates."""
    content: dict[str, Any] = {
        "name": "tiny",
        "seed": 11,
        "root": str(root),
        "model": {"source": str(source), "init": "random"},
        "data": {"train": [{"path": "memory"}], "max_prompt_tokens": 8},
        "sft": {"steps": 4, "batch_size": 8, "lr": 1e-2},
        "rollout": {"backend": "hf", "samples_per_prompt": 4, "max_response_tokens": 3},
        "train": {"backend": "torch", "lr": 1e-3, "prompts_per_iteration": 4, "mini_batches": 2},
        "reward": [{"kind": "exact_match"}],
        "placement": {"mode": "local"},
        "iterations": 3,
    }
    for name, section in sections.items():
        both = isinstance(content.get(name), dict) and isinstance(section, dict)
        content[name] = {**content[name], **section} if both else section
    return RunConfig.model_validate(content)


def tiny_run(root: Path, run_key: str = "run", **sections: Any) -> tuple[Run, StepRef]:
    """A run with its data committed, and that step. The same folder and key continue an existing run."""
    source = root / "model"
    if not source.exists():
        tiny_folder(source)
    run = create_run(tiny_config(root, source, **sections), run_key, source, {"data": "fixed"})
    return run, prepared(run)


def prepared(run: Run) -> StepRef:
    """The committed data of a tiny run, made if it is not there yet."""
    if done := run.store.committed("data"):
        return done
    with run.store.commit("data") as draft:
        prompts = [addition(index) for index in range(20)]
        save_prompts(prompts, draft.folder / "train.parquet")
        save_prompts([addition(index) for index in range(20, 25)], draft.folder / "eval.parquet")
        examples = [
            Example((*prompt.input_ids, *encode(str(prompt.answer)), EOS), len(prompt.input_ids)) for prompt in prompts
        ]
        save_examples(examples, draft.folder / "sft.parquet")
    return draft.ref
