"""Reward models that an rlhf configuration names: found, or refused with the reason, before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import RunConfig
from engine.data.templating import load_tokenizer
from engine.errors import ConfigError
from engine.runs import create_run
from tasks.scoring_models import scoring_models
from tests.helpers.models import save_model
from tests.helpers.tokenizers import TURNS_WITH_BOS


@pytest.fixture
def classifier(tmp_path: Path, model_folder: Path) -> Path:
    """A folder that says it is a reward model of the policy's family."""
    folder = tmp_path / "ranker"
    shutil.copytree(model_folder, folder)
    _change(folder, architectures=["LlamaForSequenceClassification"], id2label={"0": "score"})
    return folder


def _change(folder: Path, **options: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | options))


@pytest.fixture
def found(config: Callable[..., RunConfig], model_folder: Path) -> Callable[..., dict[str, Path]]:
    """The folders of the reward models at these sources."""

    def look(*sources: object) -> dict[str, Path]:
        reward = [{"kind": "exact_match"}, *({"kind": "model", "source": str(source)} for source in sources)]
        return scoring_models(config(reward=reward), load_tokenizer(str(model_folder), None))

    return look


def test_a_folder_is_found_by_the_key_of_its_option(found: Any, classifier: Path) -> None:
    assert found(classifier) == {"reward[1]": classifier}
    assert found() == {}


def test_everything_unusable_is_said_at_once(found: Any, classifier: Path, model_folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", template=TURNS_WITH_BOS)
    _change(other, architectures=["LlamaForSequenceClassification"], id2label={"0": "score"})
    two = shutil.copytree(classifier, tmp_path / "two")
    _change(two, id2label={"0": "bad", "1": "good"})
    with pytest.raises(ConfigError) as error:
        found(model_folder, other, two, classifier, "models:/nothing@champion")
    remedies = {problem.key: problem.remedy for problem in error.value.problems}
    assert remedies.keys() == {"reward[1].source", "reward[2].source", "reward[3].source", "reward[5].source"}
    assert "LlamaForCausalLM" in remedies["reward[1].source"]
    assert "tokenizer or chat template is not the policy's" in remedies["reward[2].source"]
    assert "2 labels" in remedies["reward[3].source"]
    assert "no alias champion" in remedies["reward[5].source"]


def test_the_content_of_a_reward_model_is_part_of_the_digest_and_its_path_is_not(
    config: Callable[..., RunConfig], model_folder: Path, classifier: Path
) -> None:
    def digest(key: str, source: str, content: str) -> str:
        options = config(reward=[{"kind": "model", "source": source}])
        run = create_run(options, key, model_folder, {"reward[0]": content}, {"reward[0]": classifier})
        run.store.lease.release()
        return run.store.config_digest

    first = digest("a", "models:/ranker@champion", "1")
    assert digest("b", "models:/ranker/3", "1") == first
    assert digest("c", "models:/ranker@champion", "2") != first
