"""Options of the model and of its training: architecture, adapter, optimiser, rate and engine; and what sections share."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("no_truth_value", "is true or false where a number is needed")
    return value


NUMBER = BeforeValidator(_no_truth_value)  # Python takes true for 1
PositiveInt = Annotated[int, NUMBER, Field(gt=0)]
NonNegativeInt = Annotated[int, NUMBER, Field(ge=0)]
PositiveFloat = Annotated[float, NUMBER, Field(gt=0.0)]
Share = Annotated[float, NUMBER, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, NUMBER, Field(ge=0.0, lt=1.0)]
Coefficient = Annotated[float, NUMBER, Field(ge=0.0)]
Real = Annotated[float, NUMBER]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no NaN; a number may be written as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False, validate_default=True)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): the policy's own weights stay frozen, W + alpha / rank * B A is trained."""

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")  # module names


class ModelConfig(Section):
    """The policy's architecture, tokenizer and starting weights."""

    source: str  # local folder, Hub id, models:/NAME@ALIAS, models:/NAME/VERSION, runs:KEY[/ITERATION] or a .gguf file
    init: Literal["pretrained", "random"] = "pretrained"  # random: weights drawn from the run seed
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat_template: str | None = None  # text of a Jinja template, used only where the tokenizer has none
    lora: LoraConfig | None = None  # None = all weights of the policy are trained


class OptimizerConfig(Section):
    """The optimiser and its rate; shared by the policy, the critic and supervised fine-tuning.

    An option that the chosen optimiser or schedule does not use is refused (checks.py).
    """

    optimizer: Literal["adamw", "adam", "rmsprop", "sgd"] = "adamw"
    lr: PositiveFloat = 1.0e-5
    betas: tuple[Share, Share] = (0.9, 0.999)  # adamw, adam
    eps: PositiveFloat = 1.0e-8  # adamw, adam, rmsprop
    alpha: Decay = 0.99  # rmsprop: how much of the mean square is kept
    momentum: Decay = 0.0  # sgd, rmsprop
    nesterov: bool = False  # sgd with momentum
    weight_decay: Coefficient = 0.0  # adamw: taken from the weights; all others: added to the gradient
    schedule: Literal["constant", "linear", "cosine", "adaptive_kl"] = "constant"  # linear and cosine end at 0
    warmup_steps: NonNegativeInt = 0
    kl_target: PositiveFloat | None = None  # adaptive_kl: nats per token that the last optimiser step should see
    lr_min: PositiveFloat = 1.0e-7  # adaptive_kl
    lr_max: PositiveFloat = 1.0e-2  # adaptive_kl
    max_grad_norm: PositiveFloat = 1.0


class EngineConfig(OptimizerConfig):
    """The engine that runs optimiser steps, whatever they learn from."""

    backend: Literal["deepspeed", "fsdp", "torch"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 0  # deepspeed
    offload_optimizer: bool = False  # deepspeed, zero_stage 1 to 3: state and update in CPU memory
    tensor_parallel: PositiveInt = 1  # fsdp, torch: ranks that share every layer; divides placement.ranks
    micro_batch_tokens: PositiveInt = 8192  # most tokens, padding included, in one forward pass of a rank
    gradient_checkpointing: bool = False


class TrainConfig(EngineConfig):
    """The optimiser steps of one iteration and the engine that runs them."""

    prompts_per_iteration: PositiveInt = 64
    mini_batches: PositiveInt = 1  # optimiser steps per epoch
    epochs: PositiveInt = 1
