"""A frozen score model gives a sequence the same score alone and in company, and never scores without a head."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.controller.worker import WorkerContext
from engine.errors import ConfigError
from engine.reward.scorer import Sample, Unscored
from engine.workers.scoring_model import ModelScorer, ScoringModel
from tests.helpers.offline import score_model
from tests.helpers.runs import tiny_config
from tests.helpers.training import model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with a score head."""
    return score_model(tmp_path / "model")


def scorer(folder: Path, **train: object) -> ModelScorer:
    config = tiny_config(folder.parent, folder, train=train)
    return ModelScorer(ScoringModel(WorkerContext("reward", 0, 1, config, folder, {"reward[0]": folder}), "reward[0]"))


def samples() -> list[Sample]:
    """Sequences of which some hold the end token, which also pads, inside and several times at their end."""
    ids = [(5, 2, 6, 2), (5, 2, 6, 2, 2, 2), (7,), (5, 6, 7, 8, 9, 10, 11, 2), (2,)]
    return [Sample("", "", index=index, token_ids=tokens) for index, tokens in enumerate(ids)]


@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_a_score_does_not_depend_on_company(folder: Path, budget: int) -> None:
    together = scorer(folder, micro_batch_tokens=budget).score(samples())
    one = scorer(folder)
    alone = [one.score([sample])[0] for sample in samples()]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-5, rtol=0)
    assert len({round(float(score), 3) for score in alone}) == len(alone), "the sequences differ in their scores"


def test_scores_are_bit_for_bit_those_of_the_finished_batch_whatever_came_first(folder: Path) -> None:
    """The parts that are computed together follow the rows, not the order of arrival: rows of one length, two to a part."""
    ids = [(5, 6, 7, 8 + index) for index in range(6)]
    rows = [Sample("", "", index=index, token_ids=tokens) for index, tokens in enumerate(ids)]
    one, parts = scorer(folder, micro_batch_tokens=8), []
    model = one._model
    one._model = SimpleNamespace(score=lambda batch: parts.append(batch.input_ids.tolist()) or model.score(batch))
    expected = one.score(rows)
    order = [3, 0, 5, 1, 4, 2]
    assert one.score(iter([rows[row] for row in order])) == [expected[row] for row in order]
    assert parts[0] == parts[1]


def test_nothing_to_score_is_no_score(folder: Path) -> None:
    assert scorer(folder).score([]) == []


def test_a_number_that_is_not_finite_leaves_the_sample_unscored(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    scores = scorer(folder).score(samples())
    assert [isinstance(score, Unscored) for score in scores] == [False, False, True, True, False]


def test_a_model_without_a_score_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\[0\].source.*score.weight"):
        scorer(model_folder(tmp_path / "model"))
