"""float32, in which runs compute, stays within 1e-6 of the definitions in float64."""

import typing

import pytest

from engine.config import AlgorithmConfig
from tests.parity.algorithm_errors import ADVANTAGES, float32_error
from tests.parity.objective_errors import LOSSES, objective_error

KNOWN = {section.model_fields["name"].default for section in typing.get_args(typing.get_args(AlgorithmConfig)[0])}


def test_every_algorithm_has_a_reference() -> None:
    assert set(ADVANTAGES) == KNOWN - {"custom"}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_scores_to_loss_in_float32(name: str) -> None:
    assert 0.0 < float32_error(name) < 1e-6


@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_fixed_rows_in_float32(name: str) -> None:
    assert 0.0 < objective_error(name) < 1e-6
