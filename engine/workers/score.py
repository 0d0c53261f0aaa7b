"""A language model's body with a score head: learns to rank completions by reward or by cost."""

from torch import Tensor

from engine.algorithms.losses import LossOutput
from engine.algorithms.preference import bradley_terry_loss, cost_model_loss
from engine.backends.base import LossFunction
from engine.batch import Batch
from engine.controller.dispatch import ROWS, dispatch
from engine.metrics import Metrics
from engine.workers.pairs import PAIRS_TO_FIRST, chosen_and_rejected, last_tokens, pair_parts
from engine.workers.trained import SEQUENCE, TrainedWorker


class ScoreWorker(TrainedWorker):
    """One rank of a reward or cost model. A sequence's score is read at its last real token."""

    head = "score"

    @dispatch(ROWS, reads=SEQUENCE)
    def compute_scores(self, batch: Batch) -> Batch:
        """scores [B]: of prompt and response together, in reward or cost units."""
        return Batch({"scores": self._score(batch, last_tokens, (len(batch),))})

    @dispatch(PAIRS_TO_FIRST, reads=(*SEQUENCE, "margins"))
    def update_reward(self, batch: Batch, normalizer: float) -> Metrics:
        """One optimiser step of the Bradley-Terry loss; normalizer: pairs over all ranks."""

        def loss(output: Tensor, part: Batch) -> LossOutput:
            chosen, rejected = chosen_and_rejected(last_tokens(output, part))
            return bradley_terry_loss(chosen, rejected, margin=part.margins[0::2], normalizer=normalizer)

        return self._step(batch, loss)

    @dispatch(PAIRS_TO_FIRST, reads=(*SEQUENCE, "is_unsafe"))
    def update_cost(self, batch: Batch, normalizer: float) -> Metrics:
        """One optimiser step of the loss of Safe RLHF, the safer completion of each pair first; normalizer: as above."""

        def loss(output: Tensor, part: Batch) -> LossOutput:
            safer, worse = chosen_and_rejected(last_tokens(output, part))
            safer_is_unsafe, worse_is_unsafe = chosen_and_rejected(part.is_unsafe)
            return cost_model_loss(worse, safer, worse_is_unsafe, safer_is_unsafe, normalizer=normalizer)

        return self._step(batch, loss)

    def _step(self, batch: Batch, loss: LossFunction) -> Metrics:
        return self.trainer.step(list(pair_parts(batch, self.context.config.train.micro_batch_tokens)), loss)
