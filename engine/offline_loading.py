"""From a YAML file to an OfflineConfig: everything that is wrong with it in one message, as engine/loading.py does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.loading import Form, NamedSources, Parsed, accepted, parse_form, read_content
from engine.offline_checks import check_offline
from engine.offlineconfig import OfflineConfig

_STAND_INS: dict[str, Any] = {
    "name": "unnamed",
    "model": {"source": "."},
    "model.source": ".",
    "data": {"train": [{"path": "."}]},
    "data.train": [{"path": "."}],
    "data.train.path": ".",
    "data.eval.path": ".",
    "objective": {"name": "sft"},
    "objective.name": "sft",
    "steps": 1,
    "registry.model": "unnamed",
}


def load_offline(source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None) -> OfflineConfig:
    """As engine.loading.load_config, for a run on fixed rows."""
    return accepted(parse_offline(source, overrides))


def parse_offline(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | None = None
) -> Parsed[OfflineConfig]:
    """Parse and check as far as possible. Raises ConfigError only if there is no mapping of options at all."""
    return parse_form(_OFFLINE, source, overrides, elsewhere=False)


def is_offline(source: str | Path | Mapping[str, Any]) -> bool:
    """Whether a configuration is one of a run on fixed rows: it has an objective. Raises ConfigError as `load_offline`."""
    return "objective" in read_content(source)[0]


def _named_sources(config: OfflineConfig) -> NamedSources:
    return [("data.train", config.data.train), ("data.eval", config.data.eval)]


_OFFLINE = Form(
    OfflineConfig,
    (("data", "train"), ("data", "eval")),
    _STAND_INS,
    lambda config, unknown, elsewhere: check_offline(config, unknown, elsewhere=elsewhere),
    _named_sources,
    lambda config: {"model.source": config.model.source},
)
