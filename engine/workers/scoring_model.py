"""A frozen reward or cost model on one rank of a scoring role: scores the policy's own tokens, for rewards and for costs."""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.backends.base import TrainerSpec
from engine.backends.device import pick_device
from engine.backends.trainers import build_trainer
from engine.backends.weights import load_folder
from engine.batch import Batch, micro_batches, restore
from engine.config import ModelConfig
from engine.controller.worker import WorkerContext
from engine.errors import ConfigError, Problem
from engine.reward.scorer import Sample, Score, Unscored, as_score
from engine.workers.pairs import last_tokens

_HEAD = "score.weight"


class ScoringModel:
    """The model of one option of the configuration, `reward[0]` say; every rank scores its own rows.

    Its weights lie as train.backend puts them: whole on every rank, or spread over the ranks of the role, which then have
    to call `score` together, with any number of rows. Raises ConfigError if the folder holds no score head.
    """

    def __init__(self, context: WorkerContext, key: str) -> None:
        config, folder = context.config, context.models[key]
        if _HEAD not in load_folder(folder):
            raise ConfigError(
                "A model cannot score.", problems=[Problem(f"{key}.source", str(folder), f"its weights lack {_HEAD}")]
            )
        self._max_tokens = config.train.micro_batch_tokens
        self._trainer = build_trainer(
            TrainerSpec(
                head="score",
                model=ModelConfig(source=str(folder), dtype=config.model.dtype),
                source=folder,
                train=config.train.model_copy(update={"tensor_parallel": 1}),
                optimizer=None,
                total_steps=1,
                seed=config.seed,
                rank=context.rank,
                world_size=context.world_size,
                device=pick_device(),
            )
        )

    def score(self, batch: Batch) -> Tensor:
        """[B] float32: the score at the last real token of every row, by its recorded length."""
        parts = list(micro_batches(batch, self._max_tokens))
        outputs = self._trainer.score([part for _, part in parts], last_tokens)
        return restore([(rows, output) for (rows, _), output in zip(parts, outputs, strict=True)], (len(batch),))


class ModelScorer:
    """A scoring model as one component of the reward; samples need their token ids.

    All samples are waited for: the last bits of a score depend on the micro-batch, and ranks compute together.
    """

    def __init__(self, model: ScoringModel) -> None:
        self._model = model

    def score(self, samples: Iterable[Sample]) -> list[Score]:
        """One finite score per sample, in order; Unscored where the model gives none."""
        came = list(samples)
        rows = sorted(range(len(came)), key=lambda place: came[place].index)  # micro-batches whatever came first
        values = self._model.score(_batch([came[place] for place in rows])).tolist()
        scores = {place: as_score(value) for place, value in zip(rows, values, strict=True)}
        return [_finite(scores[place]) for place in range(len(came))]

    def close(self) -> None:
        """Nothing to end: the weights go with the process."""


def _finite(score: Score) -> Score:
    return Unscored("not_finite", "the reward model gave no finite score") if isinstance(score, Unscored) else score


def _batch(samples: list[Sample]) -> Batch:
    lengths = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64)
    width = int(lengths.max()) if samples else 0
    input_ids = torch.zeros(len(samples), width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
    mask = torch.arange(width) < lengths[:, None]
    return Batch({"input_ids": input_ids, "attention_mask": mask, "prompt_lengths": lengths})
