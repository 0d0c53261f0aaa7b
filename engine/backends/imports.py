"""Faster imports of heavy libraries: hides optional packages that they would load for features nobody uses here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Imports inside do not find these optional packages, unless they are loaded already.

    Saves seconds in every process of a run: transformers loads scikit-learn and SciPy for assisted generation and for
    vision losses, deepspeed loads MLflow for its autotuner.
    """
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system reads None as "not there"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
