"""Turns a .gguf file into a plain Hugging Face folder: safetensors weights, tokenizer, chat template, generation config."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model of `file` into `folder`, its weights dequantised to float32, exactly as stored.

    Raises ConfigError if transformers cannot read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        quantised = AutoModelForCausalLM.from_pretrained(**place, dtype="float32")
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        remedy = "use a file of an architecture that transformers reads from GGUF, or the model's safetensors folder"
        problem = Problem("model.source", str(file), f"{remedy} ({error})")
        raise ConfigError("The GGUF file cannot be converted.", problems=[problem]) from error
    model = _plain(quantised)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _plain(quantised: "PreTrainedModel") -> Any:
    """The same weights in a model that never was quantised: transformers refuses to save one that was."""
    import torch

    config = type(quantised.config).from_dict(quantised.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # nothing is drawn or allocated for weights that are replaced at once
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    return model
