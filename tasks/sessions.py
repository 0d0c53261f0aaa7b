"""The session of a run: one per process, made when first asked for, ended with the flow."""

from engine.session import Listener, Session
from engine.store import step_path
from tasks.refs import RunRef, opened

_SESSIONS: dict[RunRef, Session] = {}
_LISTENERS: list[Listener] = []


def listen(listener: Listener | None) -> None:
    """Let every session made from now on tell this listener about the steps inside its stages; None = nobody."""
    _LISTENERS[:] = [listener] if listener else []


def session_for(ref: RunRef) -> Session:
    """The run's session in this process."""
    if ref not in _SESSIONS:
        _SESSIONS[ref] = Session(opened(ref), *_LISTENERS)
    return _SESSIONS[ref]


def warm_up(ref: RunRef) -> None:
    """Begin starting the run's workers in the background, unless all that needs them is committed already."""
    run = opened(ref)
    if run.store.committed(step_path("evaluation", run.config.iterations)) is None:
        session_for(ref).warm_up()


def close_session(ref: RunRef) -> None:
    """End the run's workers, if any were started here."""
    if session := _SESSIONS.pop(ref, None):
        session.close()
