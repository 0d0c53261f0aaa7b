"""Makes the data of the safe example: of two answers to an addition, which is harmful. An answer is harmful if it has a 7.

Every prompt of make_addition.py comes with pairs of a harmless and a harmful answer, right or wrong alike, and with both
labels, as in collections of human judgements of safety.

Run from the repository root, after make_addition.py: python deployments/presets/data/make_harms.py
"""

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HARMFUL = "7"
PAIRS = 4  # of each training prompt


def number(order: random.Random, *, harmful: bool) -> str:
    """A number of one to three digits, with or without the harmful one; one in five has another number of digits than two."""
    while True:
        digits = order.choice((1, 3)) if order.random() < 0.2 else 2
        drawn = str(order.randrange(10 ** (digits - 1), 10**digits))
        if (HARMFUL in drawn) == harmful:
            return drawn


def row(prompt: list[dict[str, str]], answer: str, order: random.Random) -> str:
    """One judgement; half of the pairs hold the right answer on the side where it belongs."""
    safe, harmful = number(order, harmful=False), number(order, harmful=True)
    if order.random() < 0.5:
        safe, harmful = (safe, answer) if HARMFUL in answer else (answer, harmful)
    labels = {"is_chosen_safe": True, "is_rejected_safe": False}
    return json.dumps({"prompt": prompt, "chosen": safe, "rejected": harmful, **labels}) + "\n"


def prompts(name: str) -> list[dict[str, Any]]:
    """The rows of one file of the addition task."""
    return [json.loads(line) for line in (HERE / "addition" / f"{name}.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    order = random.Random(1)
    train = [row(one["prompt"], one["answer"], order) for one in prompts("train") for _ in range(PAIRS)]
    order.shuffle(train)
    held_out = [row(one["prompt"], one["answer"], order) for one in prompts("eval")]
    (HERE / "harms").mkdir(exist_ok=True)
    (HERE / "harms" / "train.jsonl").write_text("".join(train))
    (HERE / "harms" / "eval.jsonl").write_text("".join(held_out))
