"""The README's table and example of rewards are those of the code."""

import re
from typing import get_args

import pytest
import yaml

from engine.config import RewardConfig
from engine.reward.checks import check_rewards
from engine.rewardconfig import Section, ServiceReward
from tests.contracts.sources import ROOT
from tests.helpers.configs import config

README = (ROOT / "README.md").read_text()
KINDS: dict[str, type[Section]] = {
    kind.model_fields["kind"].default: kind for kind in get_args(get_args(RewardConfig)[0])
}
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", README.split("| `kind` |")[1].split("```yaml")[0], re.MULTILINE))


def test_the_table_has_every_kind() -> None:
    assert ROWS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_every_option_of_its_kind(kind: str) -> None:
    options = KINDS[kind].model_fields.keys() - {"kind", "weight"}
    if issubclass(KINDS[kind], ServiceReward):
        assert ROWS[kind].endswith("and those below")
        assert all(f"`{name}`" in README for name in ServiceReward.model_fields.keys() - {"weight"})
        options -= ServiceReward.model_fields.keys()
    assert {name for name in options if f"`{name}" not in ROWS[kind]} == set()


def test_the_example_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [text for text in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "kind: judge" in text]
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    rewards = config(**yaml.safe_load(example)).reward
    problems = check_rewards(rewards)
    assert [problem.key for problem in problems] == ["reward[0].function"]  # the user's own module is not here
    assert len(rewards) == 4
