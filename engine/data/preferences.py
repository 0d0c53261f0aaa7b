"""Recognises pairs of completions: TRL, OpenRLHF and verl rows (chosen, rejected) and those of PKU-SafeRLHF.

By helpfulness (reward model, DPO) the chosen completion is the better one. By harm (cost model) it is the safer one, and
both completions are labelled safe or unsafe: `is_chosen_safe` and `is_rejected_safe`, or `is_response_0_safe` and
`is_response_1_safe` with `safer_response_id`.
"""

import math
from collections.abc import Set
from typing import Any

from engine.config import DataSource
from engine.data.schema import BadRow, Content, Shape, lacks_preference, preference_row
from engine.offlineconfig import PreferenceSource

_RESPONSES = ("response_0", "response_1")
_SAFE = ("is_chosen_safe", "is_rejected_safe")
_BETTER, _SAFER = "better_response_id", "safer_response_id"


def is_pair(columns: Set[str]) -> bool:
    """Whether a row or file with these columns holds pairs of completions."""
    return {"chosen", "rejected"} <= columns or {*_RESPONSES} <= columns


def helpful_row(values: dict[str, Any], source: DataSource) -> Content:
    """The better and the worse completion of a prompt. Raises BadRow."""
    return preference_row(_chosen_first(values, source, _BETTER), source)


def margin_row(values: dict[str, Any], source: DataSource) -> Content:
    """The same with `extra["margin"]`, by how much reward the better one leads at least. Raises BadRow."""
    content = helpful_row(values, source)
    margin = values.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin) or margin < 0:
        raise BadRow("`margin` must be a number of 0 or more")
    return _with(content, margin=float(margin))


def harm_row(values: dict[str, Any], source: DataSource) -> Content:
    """The safer and the more harmful completion, `extra` with is_chosen_safe and is_rejected_safe. Raises BadRow."""
    ordered = _chosen_first(values, source, _SAFER)
    content = preference_row(ordered, source)
    for name in _SAFE:
        if not isinstance(ordered.get(name), bool):
            raise BadRow(f"`{name}` must be true or false")
    if ordered["is_rejected_safe"] and not ordered["is_chosen_safe"]:
        raise BadRow("the safer completion is labelled unsafe and the more harmful one safe")
    return _with(content, **{name: ordered[name] for name in _SAFE})


def lacks_pair(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file of pairs by helpfulness."""
    return _lacks(columns, source, _BETTER, ())


def lacks_margin(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file of pairs with margins."""
    return _lacks(columns, source, _BETTER, ("margin",))


def lacks_harm(columns: Set[str], source: DataSource) -> dict[str, str]:
    """{option: what is missing} for a file of pairs by harm."""
    labels = tuple(f"is_{name}_safe" for name in _RESPONSES) if {*_RESPONSES} <= columns else _SAFE
    return _lacks(columns, source, _SAFER, labels)


HELPFULNESS = Shape(helpful_row, lacks_pair)
MARGINS = Shape(margin_row, lacks_margin)
HARM = Shape(harm_row, lacks_harm)


def _chosen_first(values: dict[str, Any], source: DataSource, which: str) -> dict[str, Any]:
    """The row with columns `chosen` and `rejected`, whatever it calls them; which: column that tells of two responses."""
    named = _named(source)
    if not named and {*_RESPONSES} <= values.keys():
        return _of_responses(values, which)
    chosen, rejected = named.get("chosen_key", "chosen"), named.get("rejected_key", "rejected")
    return {**values, "chosen": values.get(chosen), "rejected": values.get(rejected)}


def _of_responses(values: dict[str, Any], which: str) -> dict[str, Any]:
    first = values.get(which)
    if isinstance(first, bool) or first not in (0, 1):
        raise BadRow(f"`{which}` must be 0 or 1")
    order = (int(first), 1 - int(first))
    labels = {name: values.get(f"is_response_{number}_safe") for name, number in zip(_SAFE, order, strict=True)}
    texts = {name: values[f"response_{number}"] for name, number in zip(("chosen", "rejected"), order, strict=True)}
    return {**values, **texts, **labels}


def _lacks(columns: Set[str], source: DataSource, which: str, more: tuple[str, ...]) -> dict[str, str]:
    named = _named(source)
    for option, column in named.items():
        if column not in columns:
            return {option: f"no column `{column}`"}
    if not named and {*_RESPONSES} <= columns:
        absent = sorted({which, *more} - columns)
        return (
            {"path": f"no column {_quoted(absent)}"}
            if absent
            else lacks_preference(columns | {"chosen", "rejected"}, source)
        )
    found = lacks_preference(columns | {option.removesuffix("_key") for option in named}, source)
    absent = sorted({*more} - columns)
    return found or ({"path": f"no column {_quoted(absent)}"} if absent else {})


def _named(source: DataSource) -> dict[str, str]:
    """The columns that the configuration names: {option: column}."""
    if not isinstance(source, PreferenceSource):
        return {}
    options = {"chosen_key": source.chosen_key, "rejected_key": source.rejected_key}
    return {option: column for option, column in options.items() if column is not None}


def _with(content: Content, **extra: Any) -> Content:
    return Content(content.prompt, content.answer, content.source, extra, content.completions)


def _quoted(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
