"""Optional packages that a heavy library would load for nothing are hidden only while it is imported."""

import sys

import pytest

from engine.backends.imports import without


def test_a_hidden_package_is_not_found_and_comes_back() -> None:
    with without("antigravity"), pytest.raises(ModuleNotFoundError):
        import antigravity  # noqa: F401
    assert "antigravity" not in sys.modules


def test_a_package_that_is_loaded_already_stays() -> None:
    with without("sys"):
        assert sys.modules["sys"] is sys
    assert sys.modules["sys"] is sys
