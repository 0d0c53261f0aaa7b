"""A parent that leaves its reward open; `python -m tests.unit.reward.abandoned FUNCTION` prints the scorers' ids."""

import sys
import threading
import time

from engine.config import PythonReward
from engine.reward.combine import Reward
from engine.reward.scorer import Sample
from tests.unit.reward.functions import STUCK
from tests.unit.reward.processes import scorer_pids


def main(function: str) -> None:
    config = PythonReward(function=f"tests.unit.reward.functions:{function}", timeout_s=600.0, workers=2)
    reward = Reward((config,))
    reward.score([Sample("p", "r", extra={"row": row}) for row in range(STUCK)])
    stuck = [Sample("p", "r", extra={"row": STUCK})]
    threading.Thread(target=reward.score, args=(stuck,), daemon=True).start()
    time.sleep(0.5)  # the sample is in its process by now, and stuck
    print(*scorer_pids(), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
