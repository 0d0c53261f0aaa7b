"""Registration with the real MLflow on SQLite: one version per policy whatever was killed, aliases only after the verdict."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow.transformers
import pytest
from mlflow import MlflowClient

from engine.config import RunConfig
from engine.errors import ConfigError, StoreError
from tasks import registry
from tasks.mlflow_store import connect
from tasks.refs import RunRef, opened
from tests.unit.tasks.fake_session import FakeSession
from tests.unit.tasks.finished import Finished

pytestmark = pytest.mark.usefixtures("fake_session", "mlflow_tables")

Configure = Callable[..., RunConfig]


def client_of(ref: RunRef) -> MlflowClient:
    return connect(ref.root, None)


def test_a_policy_that_passed_becomes_champion(registered: Configure):
    run = Finished(registered(), "first")
    assert run.register() == {"name": "sums", "version": 1, "aliases": ["challenger", "champion"]}
    version = client_of(run.ref).get_model_version_by_alias("sums", "champion")
    assert version.tags["verdict"] == "promote" and version.tags["run_key"] == "first"
    assert version.tags["manifest_sha256"] == run.policy.manifest_sha256
    assert version.tags["weights_sha256"] == opened(run.ref).store.manifest(run.policy).facts["sha256"]
    assert version.tags["score.held_out"] == "0.7"


def test_the_old_champion_becomes_previous(registered: Configure):
    Finished(registered(), "old").register()
    run = Finished(registered(seed=6), "new")
    assert run.register()["version"] == 2
    assert client_of(run.ref).get_registered_model("sums").aliases == {"challenger": 2, "champion": 2, "previous": 1}


def test_a_rejected_policy_is_registered_with_its_reasons_and_is_no_champion(
    registered: Configure, fake_session: type[FakeSession]
):
    Finished(registered(), "good").register()
    fake_session.scores[2] = 0.1
    run = Finished(registered(seed=6), "bad")
    assert run.register()["aliases"] == ["challenger"]
    client = client_of(run.ref)
    assert client.get_registered_model("sums").aliases["champion"] == 1
    tags = client.get_model_version("sums", "2").tags
    assert tags["verdict"] == "reject" and "0.1000" in tags["reasons"]


@pytest.mark.parametrize(
    ("where", "call"),
    [
        (mlflow.transformers, "log_model"),
        (MlflowClient, "create_model_version"),
        (MlflowClient, "set_registered_model_alias"),
        (MlflowClient, "set_model_version_tag"),
    ],
)
def test_a_kill_between_two_calls_leaves_no_second_version_and_no_early_champion(
    registered: Configure, monkeypatch: pytest.MonkeyPatch, where: Any, call: str
):
    run = Finished(registered(), "killed")
    original = getattr(where, call)

    def killed(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, call, killed)
        with pytest.raises(KeyboardInterrupt):
            run.register()
    client = client_of(run.ref)
    assert "champion" not in client.get_registered_model("sums").aliases
    assert run.register()["aliases"] == ["challenger", "champion"]
    assert len(client.search_model_versions("name = 'sums'")) == 1
    experiment = client.get_experiment_by_name("sums").experiment_id
    assert len(client.search_logged_models([experiment])) == 1


def test_registration_happens_once(registered: Configure):
    run = Finished(registered(), "once")
    first = run.register()
    assert run.register() == first
    assert len(client_of(run.ref).search_model_versions("name = 'sums'")) == 1


def test_a_lost_chat_template_stops_the_registration(registered: Configure):
    run = Finished(registered(), "template")
    (opened(run.ref).store.folder / run.policy.path / "policy" / "chat_template.jinja").unlink()
    opened(run.ref).store._verified.add(run.policy.manifest_sha256)  # the loss happened before the commit
    with pytest.raises(StoreError, match="chat template"):
        run.register()
    assert client_of(run.ref).search_model_versions("name = 'sums'") == []


def test_an_empty_registry_is_no_obstacle(registered: Configure):
    assert registry.champion_obstacle(registered()) is None


def test_a_champion_that_is_gone_cannot_be_compared_with(registered: Configure):
    """MLflow takes the alias away with its version, so the gap is made in the database."""
    run = Finished(registered(), "gone")
    run.register()
    assert registry.champion_obstacle(registered()) is None
    with sqlite3.connect(Path(run.ref.root) / "mlflow.db") as database:
        database.execute("UPDATE registered_model_aliases SET version = 7 WHERE alias = 'champion'")
    obstacle = registry.champion_obstacle(registered())
    assert obstacle is not None and "version 7, which does not exist" in obstacle


def test_a_champion_without_the_score_cannot_be_compared_with(registered: Configure):
    run = Finished(registered(), "foreign")
    run.register()
    client_of(run.ref).delete_model_version_tag("sums", "1", "score.held_out")
    obstacle = registry.champion_obstacle(registered())
    assert obstacle is not None and "no score of suite held_out" in obstacle
    second = Finished(registered(seed=6), "second", obstacle=obstacle)
    assert second.register()["aliases"] == ["challenger"]
    assert "cannot compare" in client_of(run.ref).get_model_version("sums", "2").tags["reasons"]


def test_promote_and_rollback_move_the_champion_with_a_reason(registered: Configure, fake_session: type[FakeSession]):
    Finished(registered(), "one").register()
    fake_session.scores[2] = 0.1
    run = Finished(registered(seed=6), "two")
    run.register()
    promoted = registry.promote("sums", None, "checked by hand", run.ref.root, None)
    assert promoted["version"] == 2 and "champion" in promoted["aliases"]
    assert "checked by hand" in client_of(run.ref).get_model_version("sums", "2").tags["promoted"]
    back = registry.rollback("sums", None, "worse in use", run.ref.root, None)
    assert back["version"] == 1 and "champion" in back["aliases"]
    assert "worse in use" in client_of(run.ref).get_model_version("sums", "1").tags["rolled_back_to"]


def test_an_unknown_version_or_alias_is_refused(registered: Configure):
    run = Finished(registered(), "known")
    run.register()
    with pytest.raises(ConfigError, match="it has: 1"):
        registry.promote("sums", "9", "why", run.ref.root, None)
    with pytest.raises(ConfigError, match="no alias previous"):
        registry.rollback("sums", None, "why", run.ref.root, None)
    for move in (registry.promote, registry.rollback):
        with pytest.raises(ConfigError, match=r"no such model .*; registered: sums"):
            move("unknown", None, "why", run.ref.root, None)
