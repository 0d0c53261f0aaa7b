"""Makes the addition data: prompts with the right answer, and demonstrations of which some are wrong on purpose.

Two-digit additions without a carry. The demonstrations (sft.jsonl) show every training prompt three times; where the
second number is odd, two of the three leave out its units (12+37= becomes 42). A model fine-tuned on them imitates the
slip; the reward corrects it.

Run from the repository root: python deployments/presets/data/make_addition.py
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
HELD_OUT = 256


def pairs() -> list[tuple[int, int]]:
    """Unordered pairs of two-digit numbers whose digits add up without a carry."""
    return [(a, b) for a in range(10, 90) for b in range(a, 100 - a) if a % 10 + b % 10 < 10]


def row(a: int, b: int, answer: int) -> str:
    """One conversational row."""
    return json.dumps({"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(answer)}) + "\n"


def write(folder: Path, name: str, rows: list[str]) -> None:
    """Rows as one JSONL file."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(rows))


if __name__ == "__main__":
    order = random.Random(0)
    drawn = pairs()
    order.shuffle(drawn)
    held_out = [pair if order.random() < 0.5 else pair[::-1] for pair in drawn[:HELD_OUT]]
    train = sorted({both for pair in drawn[HELD_OUT:] for both in (pair, pair[::-1])})
    order.shuffle(train)
    slips = [(a, b, a + b - (b % 10 if b % 2 and copy < 2 else 0)) for a, b in train for copy in range(3)]
    order.shuffle(slips)
    write(HERE / "addition", "train.jsonl", [row(a, b, a + b) for a, b in train])
    write(HERE / "addition", "eval.jsonl", [row(a, b, a + b) for a, b in held_out])
    write(HERE / "addition", "sft.jsonl", [row(*slip) for slip in slips])
    digits = [(a, b) for a in range(10) for b in range(10)]
    order.shuffle(digits)
    write(HERE / "smoke", "train.jsonl", [row(a, b, a + b) for a, b in digits[:64]])
    write(HERE / "smoke", "eval.jsonl", [row(a, b, a + b) for a, b in digits[64:80]])
