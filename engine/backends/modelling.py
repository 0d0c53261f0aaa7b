"""Builds a trainer's module from a model folder: policy (logits), critic (values) or reward model (scores), nothing left to
chance."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from engine.backends.adapters import add_adapters, public_name
from engine.backends.base import TrainerSpec
from engine.backends.device import attention_kernel, parameter_dtype
from engine.backends.imports import without
from engine.backends.weights import CONFIG, check_tensors, load_folder
from engine.errors import ConfigError, Problem, StoreError

with without("sklearn", "scipy"):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

VALUE_HEAD = "value_head."
SCORE_HEAD = "score."  # as transformers' sequence classifiers name theirs


class Model(nn.Module):
    """A module with one output tensor for token ids; `named_weights` tells its tensors by Hugging Face name."""

    prefixes: dict[str, str]  # of our names -> of Hugging Face names
    tied: frozenset[str]  # Hugging Face names that are copies of others and never saved
    layer_classes: frozenset[str]  # class names of the layers it is a stack of

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.layer_classes = frozenset(causal._no_split_modules or ())

    @property
    def transformer(self) -> Any:
        """The model without its head."""
        raise NotImplementedError


class LanguageModel(Model):
    """Logits [b, T, V] of a causal language model, in the type of its parameters."""

    def __init__(self, causal: Any) -> None:
        super().__init__(causal)
        self.causal = causal
        self.prefixes = {"causal.": ""}
        self.tied = frozenset(causal.all_tied_weights_keys)

    @property
    def transformer(self) -> Any:
        """The model without its head."""
        return self.causal.base_model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """input_ids [b, T] int64, attention_mask [b, T] bool, right padded."""
        return self.causal(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class ScalarModel(Model):
    """One number [b, T] float32 from each position: the transformer of a language model under a head."""

    def __init__(self, causal: Any) -> None:
        super().__init__(causal)
        self.base = causal.base_model
        self.prefixes = {"base.": f"{causal.base_model_prefix}."}
        self.tied = frozenset()

    @property
    def transformer(self) -> Any:
        """The model without its head."""
        return self.base

    def read(self, head: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What the head reads from every position."""
        hidden = self.base(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        numbers: Tensor = head(hidden).squeeze(-1).clone()  # FSDP wants no view
        return numbers


class ValueModel(ScalarModel):
    """Values of a critic."""

    def __init__(self, causal: Any) -> None:
        super().__init__(causal)
        self.value_head = ValueHead(causal.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """input_ids [b, T] int64, attention_mask [b, T] bool, right padded."""
        return self.read(self.value_head, input_ids, attention_mask)


class ScoreModel(ScalarModel):
    """Scores of a reward or cost model: what transformers' sequence classifier with one label computes, at every position.
    Without a bias, as there."""

    def __init__(self, causal: Any) -> None:
        super().__init__(causal)
        self.score = ScoreHead(causal.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """input_ids [b, T] int64, attention_mask [b, T] bool, right padded."""
        return self.read(self.score, input_ids, attention_mask)


class ScoreHead(nn.Linear):
    """One number per position, computed in float32; starts at zero, so that a new reward model prefers nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, T, H] of any type -> [b, T, 1] float32."""
        return nn.functional.linear(hidden.float(), self.weight.float())


class ValueHead(nn.Linear):
    """One number per position, computed in float32; starts at zero, so that a new critic predicts nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, T, H] of any type -> [b, T, 1] float32."""
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


def build_module(spec: TrainerSpec) -> Model:
    """The spec's module on the CPU, the same on all ranks: pretrained, or random from spec.seed alone.

    No dropout, no cache; gradient checkpointing and adapters where trained with them. Raises StoreError if a tensor
    would have been left at random values or cannot be read, ConfigError if the architecture cannot be trained here.
    """
    config = load_config(spec.source)
    dtype = parameter_dtype(spec.model.dtype, spec.device)
    kernel = attention_kernel(spec.device, dtype)
    if spec.model.init == "random":
        causal = _random(config, spec.seed, kernel)
    else:
        causal = _pretrained(config, spec, kernel)
    _require_plain_names(causal, spec.source)
    if spec.model.lora is not None and spec.optimizer is not None and spec.head == "lm":
        add_adapters(causal, spec.model.lora, spec.seed)
    module = _with_head(causal, spec.head)
    if isinstance(module, ValueModel) and spec.model.init == "pretrained":
        _load_head(module.value_head, VALUE_HEAD, spec.source)
    if isinstance(module, ScoreModel) and spec.model.init == "pretrained":
        _load_head(module.score, SCORE_HEAD, spec.source)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)  # not module.to(): rotary frequencies must stay float32
    checkpointing = spec.optimizer is not None and spec.train.gradient_checkpointing
    if checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return module.train(checkpointing)  # without dropout the mode only tells whether to checkpoint


def load_config(source: Path) -> Any:
    """The folder's transformers configuration with every dropout at 0 and no cache."""
    if not (source / CONFIG).is_file():
        raise StoreError(f"{source} is no model folder.", remedy=f"It needs a {CONFIG}.")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except OSError as error:
        raise StoreError(f"{source / CONFIG} cannot be read: {error}", remedy=_WHOLE) from error
    except ValueError as error:
        raise _unsupported(source, "is of no type that transformers knows") from error
    if config.is_encoder_decoder:
        raise _unsupported(source, "is an encoder-decoder")
    if "quantization_config" in config.to_dict():
        raise _unsupported(source, "has quantised weights")
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, 0.0)
    config.use_cache = False
    return config


def named_weights(module: Model) -> dict[str, Tensor]:
    """Hugging Face name -> live parameter or persistent buffer, each memory once, in the order of the module.

    Factors of adapters are among them (adapters.is_factor), under names that no saved folder has.
    """
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in module.state_dict(keep_vars=True).items():
        name = public_name(_public_name(key, module.prefixes))
        if name not in module.tied and id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def expected_shapes(source: Path, head: str) -> dict[str, torch.Size]:
    """Names and shapes of a complete set of weights of this model; no memory is taken."""
    with torch.device("meta"):
        module = _with_head(AutoModelForCausalLM.from_config(load_config(source)), head)
    return {name: tensor.shape for name, tensor in named_weights(module).items()}


def classifier_of(source: Path) -> str:
    """Name of the class with which transformers loads the folder's architecture with a score head. Raises ConfigError."""
    kind = load_config(source).model_type
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise _unsupported(source, f"is of type {kind}, for which transformers has no sequence classifier")
    return str(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[kind])


def _with_head(causal: Any, head: str) -> Model:
    match head:
        case "value":
            return ValueModel(causal)
        case "score":
            return ScoreModel(causal)
        case _:
            return LanguageModel(causal)


def _public_name(key: str, prefixes: dict[str, str]) -> str:
    for ours, theirs in prefixes.items():
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key


def _random(config: Any, seed: int, kernel: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kernel)


def _pretrained(config: Any, spec: TrainerSpec, kernel: str) -> Any:
    try:
        causal, report = AutoModelForCausalLM.from_pretrained(
            spec.source,
            config=config,
            dtype=parameter_dtype(spec.model.dtype, spec.device),
            attn_implementation=kernel,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError) as error:  # no, cut off or misshapen weights
        raise StoreError(f"weights cannot be loaded from {spec.source}: {error}", remedy=_WHOLE) from error
    needed = f"{causal.base_model_prefix}." if spec.head != "lm" else ""
    tied = causal.all_tied_weights_keys
    missing = sorted(key for key in report["missing_keys"] if key.startswith(needed) and key not in tied)
    if missing:
        named = ", ".join(missing[:5])
        raise StoreError(f"{spec.source} has no weights for {named} ({len(missing)} in all).", remedy=_WHOLE)
    return causal


def _load_head(head: nn.Module, prefix: str, source: Path) -> None:
    """A folder of a critic or reward model has the head, a folder of a policy has not."""
    found = {name: tensor for name, tensor in load_folder(source).items() if name.startswith(prefix)}
    if not found:
        return
    named = {prefix + name: parameter for name, parameter in head.named_parameters()}
    check_tensors(found, {name: parameter.shape for name, parameter in named.items()}, f"head in {source}")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(found[name])


def _require_plain_names(causal: Any, source: Path) -> None:
    """Refuse architectures that keep weights in memory under other names or shapes than in their files."""
    if get_model_conversion_mapping(causal, add_legacy=False):
        raise _unsupported(source, "keeps its weights in another form than its files")


def _unsupported(source: Path, why: str) -> ConfigError:
    problem = Problem("model.source", str(source), "use a dense decoder model such as Llama, Qwen, Mistral or Gemma")
    return ConfigError(f"the model {why}; it cannot be trained here.", problems=[problem])


_WHOLE = "Use a complete folder in safetensors, or model.init: random."
