"""Makes the preference data of the addition presets: the right answer is chosen, a wrong one rejected.

The prompts are those of make_addition.py. Every training prompt comes four times: against the slip of the
demonstrations (the units of the second number left out) and against answers with wrong units, wrong tens, or another
number of digits; every held-out prompt comes once.

Run from the repository root, after make_addition.py: python deployments/presets/data/make_preferences.py
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def slip(a: int, b: int, order: random.Random) -> str:
    """The answer without the units of the second number, or of the first where there are none."""
    return str(a + b - (b % 10 or a % 10 or 10))


def units(a: int, b: int, order: random.Random) -> str:
    """Other units."""
    right = a + b
    return str(right - right % 10 + order.choice([digit for digit in range(10) if digit != right % 10]))


def tens(a: int, b: int, order: random.Random) -> str:
    """Other tens."""
    right = a + b
    return str(right % 10 + 10 * order.choice([digit for digit in range(1, 10) if digit != right // 10]))


def digits(a: int, b: int, order: random.Random) -> str:
    """One digit too few or too many."""
    right = str(a + b)
    return order.choice([right[0], right[1], right + order.choice("0123456789"), order.choice("0123456789") + right])


WRONG: tuple[Callable[[int, int, random.Random], str], ...] = (slip, units, tens, digits)


def row(prompt: list[dict[str, str]], wrong: Callable[[int, int, random.Random], str], order: random.Random) -> str:
    """One conversational preference."""
    a, b = (int(number) for number in prompt[0]["content"].rstrip("=").split("+"))
    return json.dumps({"prompt": prompt, "chosen": str(a + b), "rejected": wrong(a, b, order)}) + "\n"


def prompts(name: str) -> list[list[dict[str, str]]]:
    """The prompts of one file of the addition task."""
    lines = (HERE / "addition" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


if __name__ == "__main__":
    order = random.Random(0)
    train = [row(prompt, wrong, order) for prompt in prompts("train") for wrong in WRONG]
    order.shuffle(train)
    held_out = [row(prompt, WRONG[number % len(WRONG)], order) for number, prompt in enumerate(prompts("eval"))]
    (HERE / "preferences").mkdir(exist_ok=True)
    (HERE / "preferences" / "train.jsonl").write_text("".join(train))
    (HERE / "preferences" / "eval.jsonl").write_text("".join(held_out))
