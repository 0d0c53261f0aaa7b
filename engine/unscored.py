"""Samples without a score: counted over a whole step, and written down for the operator to look at."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.batch import Batch
from engine.errors import TransientError
from engine.writing import writing

FILE = "unscored.jsonl"

log = logging.getLogger(__name__)


def check_unscored(batch: Batch, max_share: float, folder: Path, step: str) -> None:
    """Accept the scores of a step, of all ranks together, if at most max_share of its samples have none.

    What has none is logged in one line. Above the share nothing is committed: TransientError with counts, the first
    reason and the file below `folder` that holds all of them.
    """
    file = folder / f"unscored-{step.replace('/', '-')}.jsonl"
    file.unlink(missing_ok=True)  # of an earlier attempt
    rows = list(_rows(batch))
    if not rows:
        return
    samples = len({row["sample"] for row in rows})
    counts = ", ".join(f"{name} {count}" for name, count in Counter(row["component"] for row in rows).items())
    first = rows[0]
    found = (
        f"{samples} of {len(batch)} samples have no score ({counts}); "
        f"the first is sample {first['sample']}, component {first['component']}: {first['reason']}"
    )
    if samples <= max_share * len(batch):
        log.warning("%s: %s", step, found)
        return
    write_unscored(batch, file)
    raise TransientError(
        f"max_unscored_share allows {max_share:g}, but {found}",
        remedy=f"All are in {file}. Mend the scorer, raise its timeout_s, or raise max_unscored_share; then resume the run.",
        role="reward",
    )


def write_unscored(batch: Batch, file: Path) -> None:
    """One JSON line per sample and component without a score, with prompt, response and reason; no file if there is none."""
    lines = [json.dumps(row) for row in _rows(batch)]
    if lines:
        with writing(file):
            file.write_text("\n".join(lines) + "\n")


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    names = ("prompt", "response", "answer")
    texts = list(zip(*(batch.column(name) for name in names), strict=True))
    for column, prefix in (("unscored", ""), ("cost_unscored", "cost ")):
        for sample, reasons in enumerate(batch.columns.get(column, ())):
            for component, reason in reasons.items():
                shown = dict(zip(names, texts[sample], strict=True))
                yield {"sample": sample, "component": f"{prefix}{component}", "reason": reason, **shown}
