"""HandOver: brings the policy's weights into the rollout engines of one set of workers and proves that they are served."""

from collections.abc import Callable

from engine.backends.transfer import require_arrived
from engine.backends.transfer_ipc import merged
from engine.backends.weight_sync import (
    LOGPROB_BOUNDS,
    exchange_folder,
    is_here,
    probe_sequences,
    retract,
    verify_served,
)
from engine.config import RunConfig
from engine.controller.layout import Transport, shares_pool, transport
from engine.dataflows.roles import Roles
from engine.workers.policy import PolicyWorker
from engine.workers.rollout import RolloutWorker


class HandOver:
    """Policy and engines stay where they are while their processes live, so the way between them is found once.

    Whatever the way: the engines confirm every tensor's checksum, reset their prefix cache, and then score a few fixed
    sequences beside the trainer.
    """

    def __init__(self, roles: Roles, config: RunConfig, run_key: str, vocabulary: int) -> None:
        self._policy, self._rollout, self._config = roles.policy, roles.rollout, config
        self._folder = str(exchange_folder(run_key))
        self._probes = probe_sequences(vocabulary, config.seed)
        engine = self._rollout.call(RolloutWorker.device)
        self.transport: Transport = transport(config, self._policy.call(PolicyWorker.device), engine)
        self._takes_turns = engine != "cpu" and shares_pool(config, "rollout")
        self._same_host: bool | None = None  # known after the first file
        self._connected = False

    def serve(self, version: int) -> None:
        """Every engine serves the policy's present weights. Raises DivergedError if its log-probabilities are others."""
        if self._takes_turns:
            self._rollout.call(RolloutWorker.wake)
        ways: dict[Transport, Callable[[int], None]] = {
            "file": self._by_file,
            "ipc": self._by_mapping,
            "broadcast": self._by_broadcast,
        }
        ways[self.transport](version)
        self._verify(version)

    def rest(self) -> bool:
        """Let an engine that shares its GPU with trainers give its memory back; True if it must be served again."""
        return self._takes_turns and bool(self._rollout.call(RolloutWorker.sleep))

    def _by_file(self, version: int) -> None:
        handle = self._policy.call(PolicyWorker.publish, self._folder, version)
        try:
            if self._same_host is None:
                self._same_host = all(self._rollout.call(RolloutWorker.sees, handle))
            if self._same_host:
                self._rollout.call(RolloutWorker.receive, handle)
            else:
                content = self._policy.submit(PolicyWorker.carry, handle)
                self._rollout.call(RolloutWorker.receive_carried, handle, content, self._folder)
            if not is_here(handle):
                self._policy.call(PolicyWorker.retract, handle)
        finally:
            retract(handle)

    def _by_mapping(self, version: int) -> None:
        if not self._connected:
            self._rollout.call(RolloutWorker.join_mapping)
            self._connected = True
        exported = merged(self._policy.call(PolicyWorker.export, version))
        arrived = self._rollout.call(RolloutWorker.receive_mapped, exported)
        self._policy.call(PolicyWorker.release)
        require_arrived(exported.manifest, [device for engine in arrived for device in engine])

    def _by_broadcast(self, version: int) -> None:
        if not self._connected:
            endpoint = self._policy.call(PolicyWorker.listen, self._rollout.mesh.size)
            joining = self._rollout.submit(RolloutWorker.join_broadcast, endpoint)
            self._policy.call(PolicyWorker.join_broadcast, endpoint)
            joining.result()
            self._connected = True
        manifest = self._policy.call(PolicyWorker.describe, version)
        receiving = self._rollout.submit(RolloutWorker.receive_broadcast, manifest)
        self._policy.call(PolicyWorker.broadcast)
        arrived = receiving.result()
        require_arrived(manifest, [device for engine in arrived for device in engine])

    def _verify(self, version: int) -> None:
        trained = self._policy.submit(PolicyWorker.probe, self._probes)
        served = self._rollout.submit(RolloutWorker.probe, self._probes)
        for rows in served.result():
            verify_served(
                rows,
                trained.result(),
                bound=LOGPROB_BOUNDS[self._config.model.dtype],
                served_version=version,
                trained_version=version,
            )
