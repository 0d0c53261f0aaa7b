"""Shared by the tests of the data layer: files written byte for byte, and configurations that name them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import DataConfig

Write = Callable[[str, list[Any]], str]


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    """Writes rows as JSON Lines and returns the path."""

    def write(name: str, rows: list[Any]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def raw(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes bytes and returns the path."""

    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def config() -> Callable[..., DataConfig]:
    """A DataConfig of training paths and options; eval is a path or absent."""

    def make(*train: str, eval: str | None = None, **options: Any) -> DataConfig:
        held_out = () if eval is None else ({"path": eval},)
        return DataConfig.model_validate({"train": [{"path": path} for path in train], "eval": held_out, **options})

    return make
