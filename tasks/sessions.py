"""The session of a run: one per process, made when first asked for, ended with the flow."""

from typing import Any

from engine.offline_session import OfflineSession
from engine.offlineconfig import OfflineConfig
from engine.runs import Run
from engine.session import Listener, Session
from engine.store import step_path
from tasks.refs import RunRef, opened

_SESSIONS: dict[RunRef, Any] = {}  # a Session or, of a run on fixed rows, an OfflineSession
_LISTENERS: list[Listener] = []


def listen(listener: Listener | None) -> None:
    """Let every session made from now on tell this listener about the steps inside its stages; None = nobody."""
    _LISTENERS[:] = [listener] if listener else []


def session_for(ref: RunRef) -> Session:
    """The run's session in this process."""
    session: Session = _session(ref)
    return session


def offline_session_for(ref: RunRef) -> OfflineSession:
    """The session of a run on fixed rows in this process."""
    session: OfflineSession = _session(ref)
    return session


def warm_up(ref: RunRef) -> None:
    """Begin starting the run's workers in the background, unless all that needs them is committed already."""
    run = opened(ref)
    if run.store.committed(step_path("evaluation", run.config.iterations)) is None:
        _session(ref).warm_up()


def _session(ref: RunRef) -> Any:
    if ref not in _SESSIONS:
        _SESSIONS[ref] = _new(opened(ref))
    return _SESSIONS[ref]


def _new(run: Run[Any]) -> Session | OfflineSession:
    if isinstance(run.config, OfflineConfig):
        return OfflineSession(run, *_LISTENERS)
    return Session(run, *_LISTENERS)


def close_session(ref: RunRef) -> None:
    """End the run's workers, if any were started here."""
    if session := _SESSIONS.pop(ref, None):
        session.close()
