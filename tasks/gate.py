"""The gate: whether the final policy may become champion. Whatever is missing, not a number or not comparable rejects."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.config import GateConfig, RunConfig
from engine.guards import equal_scores
from engine.offlineconfig import OfflineGateConfig
from engine.runs import Run
from engine.store import StepRef, step_path
from tasks.refs import RunRef, durable, opened

_SCORE, _COST = ("score_mean", "components"), ("cost_mean", "cost_components")
_TOLERANCE = 1e-9  # a gain of exactly min_gain passes although binary fractions fall short of it


@dataclass(frozen=True)
class Verdict:
    """promote or reject, with the reasons: what was compared, or why nothing could be."""

    verdict: Literal["promote", "reject"]
    reasons: tuple[str, ...]


class _NoScore(ValueError):
    """A report from which no score can be taken."""


def judge(
    report: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None, gate: GateConfig | OfflineGateConfig
) -> Verdict:
    """The verdict on a policy from its evaluation report and that of the start checkpoint.

    report, baseline: {suite: {"score_mean": float | None, "rows": int, ...}}; None = the evaluation did not finish.
    """
    try:
        score = _value(report, gate.suite, _SCORE, gate.component, "the final policy")
        start = _value(baseline, gate.suite, _SCORE, gate.component, "the start checkpoint")
        cost = math.nan
        if gate.max_cost is not None:
            cost = _value(report, gate.suite, _COST, gate.cost_component, "the final policy")
    except _NoScore as fault:
        return Verdict("reject", (str(fault),))
    gain = score - start
    checks = [
        (
            gain >= gate.min_gain - _TOLERANCE,
            f"gain {gain:+.4f} ({start:.4f} -> {score:.4f}), at least {gate.min_gain:+g}",
        )
    ]
    if gate.min_score is not None:
        checks.append((score >= gate.min_score, f"score {score:.4f}, at least {gate.min_score:g}"))
    if gate.max_cost is not None:
        checks.append((cost <= gate.max_cost, f"cost {cost:.4f}, at most {gate.max_cost:g}"))
    failed = [text for passed, text in checks if not passed]
    what = gate.suite if gate.component is None else f"{gate.suite}, {gate.component}"
    if failed:
        return Verdict("reject", tuple(f"{what}: {text} was asked" for text in failed))
    return Verdict("promote", tuple(f"{what}: {text} was asked" for _, text in checks))


@durable("gate")
def gate_policy(run: RunRef, evaluation: StepRef, baseline: StepRef, obstacle: str | None) -> StepRef:
    """Commit the verdict on the final policy; its facts are {"verdict", "reasons"}.

    evaluation, baseline: reports of the final policy and of the start checkpoint; obstacle: why the registry's champion
    cannot be compared with, which rejects. So do scores that never differed within an iteration.
    """
    store, config = opened(run).store, opened(run).config
    if done := store.committed("gate", parent=evaluation):
        return done
    report, before = (store.manifest(step).facts["suites"] for step in (evaluation, baseline))
    obstacle = obstacle and f"cannot compare: {obstacle}"
    if reason := obstacle or nothing_to_learn_from(opened(run)):
        verdict = Verdict("reject", (reason,))
    else:
        verdict = judge(report, before, config.gate)
    with store.commit("gate", parent=evaluation) as draft:
        draft.facts = {"verdict": verdict.verdict, "reasons": list(verdict.reasons)}
        content = {**asdict(verdict), "gate": config.gate.model_dump(), "report": report, "baseline": before}
        (draft.folder / "verdict.json").write_text(json.dumps(content, indent=1))
    return draft.ref


def nothing_to_learn_from(run: Run[Any]) -> str | None:
    """Why the run cannot have improved anything: all its scores were the same. None = there is no such reason."""
    config, found = run.config, set[float]()
    if not isinstance(config, RunConfig) or config.cost:
        return None
    for iteration in range(1, config.iterations + 1):
        step = run.store.committed(step_path("train", iteration))
        score = equal_scores(run.store.manifest(step).metrics) if step else None
        if score is None:
            return None
        found.add(score)
    each = ", ".join(f"{score:g}" for score in sorted(found))
    return f"within each of the {config.iterations} iterations all scores were the same ({each}): they teach nothing"


def verdict_of(run: RunRef, gate: StepRef) -> Verdict:
    """The committed verdict."""
    facts = opened(run).store.manifest(gate).facts
    return Verdict(facts["verdict"], tuple(facts["reasons"]))


def _value(
    report: Mapping[str, Any] | None, suite: str, keys: tuple[str, str], component: str | None, whose: str
) -> float:
    """The mean under keys[0] of a suite, or that of one component under keys[1]."""
    if report is None:
        raise _NoScore(f"the evaluation of {whose} did not finish")
    if suite not in report:
        found = ", ".join(report) or "none"
        raise _NoScore(f"the evaluation of {whose} has no suite {suite} (found: {found})")
    entry = report[suite]
    rows = entry.get("rows")
    value = entry.get(keys[0]) if component is None else entry.get(keys[1], {}).get(component)
    if not isinstance(rows, int) or rows < 1:
        raise _NoScore(f"{suite}: {whose} was evaluated on {rows} rows")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        what = component or keys[0]
        raise _NoScore(f"{suite}: {what} of {whose} is {value!r}, which is no number")
    return float(value)
