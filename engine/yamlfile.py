"""YAML text to plain values: nothing given twice, `1e-4` is a number, `section.option=value` changes single options."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError, Problem

Place = tuple[str | int, ...]  # where an option stands, for instance ("data", "train", 0, "path")

_ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_]\w*(\.\w+|\[\d+\])*)=(?P<value>.*)", re.DOTALL)
_INDEX = re.compile(r"\[(\d+)\]")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but a number may be written 1e-4."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number, but 1:30 stays text: YAML 1.1 would take it for 90."""
    if ":" in node.value:
        return loader.construct_scalar(node)
    return loader.construct_yaml_int(node) if node.tag.endswith(":int") else loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def dotted(place: Place) -> str:
    """How a place is written: data.train[0].path"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def read_yaml(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The mapping in a file, and the keys given twice. Raises ConfigError if there is no mapping to be had from it."""
    try:
        text = path.read_bytes()
    except OSError as error:
        remedy = f"it cannot be read ({error.strerror}); name an existing YAML file"
        raise ConfigError("There is no configuration.", problems=[Problem("CONFIG", str(path), remedy)]) from error
    try:
        node, content = _parsed(text)
    except yaml.YAMLError as error:
        raise _no_mapping(path, f"it is no valid YAML: {_fault(error)}") from error
    if node is None or not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise _no_mapping(path, f"it must hold a mapping of options; it holds {found}")
    return content, list(_given_twice(node, ()))


def assign(content: dict[str, Any], assignments: Sequence[str]) -> tuple[list[Place], list[Problem]]:
    """Apply `section.option=value` texts in order: the places they changed, and those that cannot be applied."""
    places: list[Place] = []
    problems: list[Problem] = []
    for text in assignments:
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            problems.append(Problem("--set", text, "write it as section.option=value"))
            continue
        place = _place(match["key"])
        try:
            _, value = _parsed(match["value"])
        except yaml.YAMLError as error:
            problems.append(Problem("--set", text, f"the value is no valid YAML: {_fault(error)}"))
            continue
        fault = _assign_one(content, place, value)
        if fault is None:
            places.append(place)
        else:
            problems.append(Problem("--set", text, fault))
    return places, problems


def _parsed(text: str | bytes) -> tuple[yaml.Node | None, Any]:
    """The node tree of a text and what it stands for. Raises YAMLError, also where an alias stands in what it repeats."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None, None
    _require_an_end(node, [], set())
    return node, loader.construct_document(node)


def _require_an_end(node: yaml.Node, around: list[yaml.Node], finished: set[int]) -> None:
    if isinstance(node, yaml.ScalarNode) or id(node) in finished:
        return
    if any(node is outer for outer in around):
        mark = node.start_mark
        raise yaml.MarkedYAMLError(problem="an alias repeats the very section that it stands in", problem_mark=mark)
    inside = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    for part in inside:
        _require_an_end(part, [*around, node], finished)
    finished.add(id(node))


def _place(key: str) -> Place:
    parts = _INDEX.sub(r".\1", key).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _assign_one(content: dict[str, Any], place: Place, value: Any) -> str | None:
    """Set one value, making sections that are not there; returns why it cannot be set."""
    holder: Any = content
    for depth, part in enumerate(place):
        last = depth == len(place) - 1
        if isinstance(holder, dict) and isinstance(part, str):
            if last:
                holder[part] = value
            elif holder.get(part) is None:
                holder[part] = {}
        elif isinstance(holder, list) and isinstance(part, int):
            if part >= len(holder):
                return f"{dotted(place[:depth])} has {len(holder)} entries, counted from 0"
            if last:
                holder[part] = value
        else:
            kind = "a list; give the number of an entry" if isinstance(holder, list) else "no section with options"
            return f"{dotted(place[:depth])} is {kind}"
        holder = holder[part]
    return None


def _given_twice(node: yaml.Node, place: Place) -> Iterator[Problem]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _given_twice(item, (*place, index))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                remedy = f"the key stands there twice (first on line {lines[name]}); remove one of the two"
                yield Problem(dotted((*place, name)), f"line {line}", remedy)
            lines[name] = line
            yield from _given_twice(value, (*place, name))


def _no_mapping(path: Path, remedy: str) -> ConfigError:
    return ConfigError("The configuration cannot be read.", problems=[Problem("CONFIG", str(path), remedy)])


def _fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return str(error).splitlines()[0]
