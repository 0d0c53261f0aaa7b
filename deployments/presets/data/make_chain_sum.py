"""Writes chain_sum/train.jsonl and chain_sum/eval.jsonl beside this file: sums of two terms with one or two digits,
without differences, which a model of this size does not learn on the way.

Deterministic: the same rows with every run. No question occurs twice, within a file or across both.

    python deployments/presets/data/make_chain_sum.py
"""

import json
import random
from pathlib import Path
from typing import Any

import reasoning_gym

SEED = 20250
TRAIN_ROWS, EVAL_ROWS = 1000, 128
TERMS, DIGITS = (2, 2), (1, 2)


def unique_entries(count: int) -> list[dict[str, Any]]:
    """The first `count` entries of the procedural data set whose questions differ."""
    dataset = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=TERMS[0],
        max_terms=TERMS[1],
        min_digits=DIGITS[0],
        max_digits=DIGITS[1],
        seed=SEED,
        size=8 * count,
    )
    entries = {entry["question"]: entry for entry in dataset if "-" not in entry["metadata"]["expression"]}
    if len(entries) < count:
        raise SystemExit(f"{len(entries)} different questions of {count} wanted: raise DIGITS or TERMS.")
    return list(entries.values())[:count]


def row(entry: dict[str, Any]) -> dict[str, Any]:
    """One line of the file: a chat prompt, its answer and what the verifier needs."""
    prompt = [{"role": "user", "content": entry["question"]}]
    return {"prompt": prompt, "answer": entry["answer"], "extra_info": {"metadata": entry["metadata"]}}


def main() -> None:
    """Write both files."""
    entries = unique_entries(TRAIN_ROWS + EVAL_ROWS)
    random.Random(SEED).shuffle(entries)  # one-digit questions run out early; both files get the same share of them
    folder = Path(__file__).parent / "chain_sum"
    folder.mkdir(exist_ok=True)
    for name, part in (("train", entries[EVAL_ROWS:]), ("eval", entries[:EVAL_ROWS])):
        lines = [json.dumps(row(entry)) + "\n" for entry in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
