"""`hybridflow repair`: what processes that died left half done is closed, in the run directories and in Prefect."""

from engine.commands.outcome import Outcome
from engine.repair import repair_runs
from engine.roots import absolute_root


def repair(root: str) -> Outcome:
    """Close the attempts of processes that died, remove their drafts and leases; living ones are left alone.

    Prefect's server, the embedded one included, is only asked where flow runs have to be closed in it.
    """
    repairs = repair_runs(root)
    if lost := [flow_run for done in repairs for flow_run in done.flow_runs]:
        _close_flow_runs(root, lost)
    rows = [
        {"run_key": done.run_key, "repaired": done.text} | ({"error": done.obstacle} if done.obstacle else {})
        for done in repairs
    ]
    lines = [f"{row['run_key']}: {row['repaired']}" for row in rows if row["repaired"]] or ["nothing to repair"]
    return Outcome({"status": "completed", "root": absolute_root(root), "runs": rows}, "\n".join(lines))


def _close_flow_runs(root: str, flow_runs: list[str]) -> None:
    from tasks import embedded

    server = embedded.start(root)
    try:
        if server is not None:
            server.wait_ready()
        from tasks.zombies import close_flow_runs

        close_flow_runs(flow_runs)
    finally:
        if server is not None:
            server.stop()
