"""Reference: the frozen start policy that the KL terms are measured against."""

from engine.batch import Batch
from engine.controller.dispatch import ROWS, dispatch
from engine.workers.policy import PolicyWorker
from engine.workers.trained import SEQUENCE


class ReferenceWorker(PolicyWorker):
    """One rank of the reference: a policy without an optimiser."""

    @dispatch(ROWS, reads=SEQUENCE)
    def compute_logprobs(self, batch: Batch) -> Batch:
        """ref_logprobs [B, R]: log-probabilities of the responses under the start policy, sampling temperature."""
        logprobs = self._score(batch, self._logprobs, tuple(batch.response_mask.shape))
        return Batch({"ref_logprobs": logprobs})
