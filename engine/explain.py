"""What pydantic finds wrong with a configuration, in the words of the configuration: key, value found, remedy."""

import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from engine.config import RunConfig, Section
from engine.errors import Problem
from engine.yamlfile import Place, dotted

# Where pydantic puts the discriminator's value into a location.
_TAG_AT = {
    "algorithm": 1,
    "objective": 1,
    "reward": 2,
    "cost": 2,
}
_SECRET = re.compile(r"(?i)(^|_)(token|secret|password|key)$")  # in the name of an option that does not exist
_SHOWN = 100  # characters of a value in a message


def place_of(error: ErrorDetails) -> Place:
    """Where the fault stands in the YAML file."""
    loc = error["loc"]
    at = _TAG_AT.get(str(loc[0])) if loc else None
    return loc if at is None else loc[:at] + loc[at + 1 :]


def problem_of(error: ErrorDetails, top: type[Section] = RunConfig) -> Problem:
    """One fault with what was found and what to do; top: the options of the whole file."""
    place, value, kind = place_of(error), shown(error["input"]), error["type"]
    if kind == "extra_forbidden":
        found = "***" if _SECRET.search(str(place[-1])) else value
        return Problem(dotted(place), found, _unknown_option(error["loc"], dotted(place), top))
    if kind == "missing":
        return Problem(dotted(place), None, "is missing, and has no default")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_tag(error, place, top)
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", error["ctx"]["expected"]) or [error["ctx"]["expected"]]
        return Problem(dotted(place), value, f"is not known; use {_one_of(known)}{_did_you_mean(value, known)}")
    if kind in ("model_type", "model_attributes_type"):
        return Problem(dotted(place), value, "must be a section with options, written {option: value}")
    if kind == "invalid_key":
        return Problem(dotted(place), value, "is no name of an option; quote it if YAML reads it as something else")
    return Problem(dotted(place), value, re.sub(r"^\w+ should ", "must ", error["msg"]))


def shown(value: Any) -> Any:
    """A value as it fits a message."""
    text = repr(value)
    return value if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _unknown_tag(error: ErrorDetails, place: Place, top: type[Section]) -> Problem:
    key = error["ctx"]["discriminator"].strip("'")
    known = [tag for section in _sections(error["loc"], top) for tag in _tags(section)]
    if error["type"] == "union_tag_not_found":
        return Problem(dotted((*place, key)), None, f"is missing; use {_one_of(known)}")
    tag = error["ctx"]["tag"]
    return Problem(dotted((*place, key)), tag, f"is not known; use {_one_of(known)}{_did_you_mean(tag, known)}")


def _unknown_option(loc: Place, key: str, top: type[Section]) -> str:
    name, options = (
        str(loc[-1]),
        sorted({name for section in _sections(loc[:-1], top) for name in section.model_fields}),
    )
    where = dotted(loc[:-1]) or "the file"
    if close := difflib.get_close_matches(name, options, n=1):
        return f"is no option here; did you mean {close[0]}?"
    # An option of another algorithm or objective stands at the very same place, where it is no use.
    elsewhere = [other for other in _all_options(top) if other.rsplit(".", 1)[-1] == name and other != key]
    if elsewhere:
        return f"is no option here; did you mean {' or '.join(elsewhere)}?"
    return f"is no option here; {where} has {', '.join(options)}"


def _sections(loc: Place, top: type[Section]) -> list[type[Section]]:
    """The sections that may stand at a location as pydantic writes it, discriminator values included."""
    found: list[type[Section]] = [top]
    named = False  # the next part is a name that the user chose
    for part in loc:
        if isinstance(part, int) or named:
            named = False
            continue
        named = any(part in section.model_fields and _is_mapping(section.model_fields[part]) for section in found)
        tagged = [section for section in found if part in _tags(section)]
        found = tagged or [
            inner
            for section in found
            if part in section.model_fields
            for inner in _inner(section.model_fields[part].annotation)
        ]
    return found


def _is_mapping(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def _inner(annotation: Any) -> list[type[Section]]:
    """The sections in an annotation such as tuple[X, ...] or X | None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in typing.get_args(annotation) for section in _inner(argument)]


def _tags(section: type[Section]) -> list[str]:
    """The values of a section's discriminator; empty if it has none."""
    fields = [section.model_fields[name] for name in ("name", "kind") if name in section.model_fields]
    literals = [
        typing.get_args(item.annotation) for item in fields if typing.get_origin(item.annotation) is typing.Literal
    ]
    return [tag for values in literals for tag in values]


def _all_options(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _inner(field.annotation):
            yield from _all_options(inner, f"{prefix}{name}.NAME." if _is_mapping(field) else f"{prefix}{name}.")


def _one_of(known: list[str]) -> str:
    return f"one of {', '.join(known)}" if len(known) > 1 else known[0]


def _did_you_mean(value: Any, known: list[str]) -> str:
    close = difflib.get_close_matches(str(value), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
