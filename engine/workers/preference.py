"""A language model that learns from pairs of completions (DPO), and the frozen one it is compared with."""

from torch import Tensor

from engine.algorithms.losses import LossOutput
from engine.algorithms.preference import dpo_loss
from engine.batch import Batch
from engine.controller.dispatch import ROWS, dispatch
from engine.metrics import Metrics
from engine.workers.pairs import PAIRS_TO_FIRST, chosen_and_rejected, pair_parts
from engine.workers.policy import PolicyWorker, response_logprobs
from engine.workers.trained import SEQUENCE


class PreferenceWorker(PolicyWorker):
    """One rank of the model, or of the reference."""

    @dispatch(ROWS, reads=SEQUENCE)
    def score_completions(self, batch: Batch) -> Batch:
        """logprobs [B, R]: log-probabilities of the completions under the present weights, temperature 1."""
        scored = self._score(batch, _logprobs, tuple(batch.response_mask.shape))
        return Batch({"logprobs": scored})

    @dispatch(PAIRS_TO_FIRST, reads=(*SEQUENCE, "ref_logprobs"))
    def update_dpo(self, batch: Batch, kind: str, beta: float, normalizer: float) -> Metrics:
        """One optimiser step; kind, beta: of dpo_loss; normalizer: pairs over all ranks."""

        def loss(logits: Tensor, part: Batch) -> LossOutput:
            logprobs = chosen_and_rejected(_logprobs(logits, part))
            reference = chosen_and_rejected(part.ref_logprobs)
            masks = chosen_and_rejected(part.response_mask)
            return dpo_loss(*logprobs, *reference, *masks, kind=kind, beta=beta, normalizer=normalizer)

        return self.trainer.step(list(pair_parts(batch, self.context.config.train.micro_batch_tokens)), loss)


def _logprobs(logits: Tensor, part: Batch) -> Tensor:
    return response_logprobs(logits, part, 1.0)
