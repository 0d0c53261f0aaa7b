"""Rollback: an earlier version becomes champion again, with the reason on record."""

from typing import Any

from prefect import flow

from tasks import registry


@flow(name="rollback")
def rollback(
    name: str, reason: str, version: str | None = None, root: str = "runs", tracking_uri: str | None = None
) -> dict[str, Any]:
    """Point `champion` at a version and `previous` at the champion before; returns name, version and aliases.

    version: None = the previous champion; root: folder of runs whose SQLite file is the registry where tracking_uri is None.
    """
    return registry.rollback(name, version, reason, root, tracking_uri)
