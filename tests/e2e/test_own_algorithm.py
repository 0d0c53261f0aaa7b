"""The worked example of CONTRIBUTING.md: an algorithm in one file outside the project, run as it stands there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.dataflows.find import find_dataflow
from engine.errors import ConfigError
from tests.helpers.learning import learn_toy, toy_config, toy_scorers
from tests.helpers.tiny import tiny_folder

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)[0]
OPTIONS = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)[0])["algorithm"]


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example as a module that Python finds."""
    file = tmp_path / "own" / "median_baseline.py"
    file.parent.mkdir()
    file.write_text(CODE)
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.delitem(sys.modules, "median_baseline", raising=False)
    return file


def test_the_example_is_under_forty_lines() -> None:
    assert len(CODE.splitlines()) < 40


@pytest.mark.learning
@pytest.mark.usefixtures("own_module")
def test_the_example_learns(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "model")
    with toy_scorers(source) as scorers:
        outcome = learn_toy(toy_config(source, OPTIONS), source, scorers)
    assert outcome.end >= outcome.start + 0.25, outcome


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a module that is not there": ({"dataflow": "no_such_module"}, "algorithm.dataflow"),
    "a module that is no dataflow": ({"dataflow": "json"}, "has no function make_experience and no learn"),
    "an option that it does not have": ({"options": {"bond": 1}}, "algorithm.options.bond"),
    "a value that does not fit": ({"options": {"bound": "wide"}}, "algorithm.options.bound"),
}


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_dataflow(toy_config(tmp_path / "model", {**OPTIONS, **changed}))


def test_options_without_a_class_for_them_are_refused(own_module: Path, tmp_path: Path) -> None:
    own_module.write_text(CODE.replace("class Options", "class Other"))
    with pytest.raises(ConfigError, match="has no class Options"):
        find_dataflow(toy_config(tmp_path / "model", OPTIONS))
