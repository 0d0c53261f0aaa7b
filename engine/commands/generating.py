"""`hybridflow generate`: greedy answers of any model source, as a user of the model would get them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.architecture import read_model_config
from engine.backends.imports import without
from engine.commands.models import Registry
from engine.commands.outcome import Outcome
from engine.errors import ConfigError, Problem

if TYPE_CHECKING:
    from engine.data.templating import PromptEncoder


def generate(where: Registry, source: str, prompts: list[str], max_tokens: int) -> Outcome:
    """One answer per prompt; a prompt is put to a chat model as a user's message."""
    with without("sklearn", "scipy"):
        import torch
        from transformers import AutoModelForCausalLM
    from engine.backends.device import pick_device
    from engine.backends.serving import end_token_ids
    from engine.data.templating import PromptEncoder, load_tokenizer
    from tasks.models import resolve_source

    folder = resolve_source(source, where.root, where.tracking_uri)
    _require_language_model(source, folder)
    encoder = PromptEncoder(load_tokenizer(str(folder), None))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(pick_device()).eval()
    ends = list(end_token_ids(folder))
    answers = []
    for prompt in prompts:
        ids = torch.tensor([_ids(encoder, prompt)], device=model.device)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        text: Any = encoder.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        answers.append({"prompt": prompt, "answer": text})
    content = {"status": "completed", "source": source, "folder": str(folder), "answers": answers}
    return Outcome(content, "\n".join(str(item["answer"]) for item in answers))


def _require_language_model(source: str, folder: Path) -> None:
    """Raises ConfigError for a model that scores: transformers would give it an untrained head to write with."""
    for name in read_model_config(folder).get("architectures") or []:
        if name.endswith("ForSequenceClassification"):
            remedy = f"it is a {name}, which writes no text; name a language model"
            raise ConfigError("Nothing can be generated.", problems=[Problem("SOURCE", source, remedy)])


def _ids(encoder: "PromptEncoder", prompt: str) -> tuple[int, ...]:
    turns = [{"role": "user", "content": prompt}]
    return encoder.encode([encoder.render(turns if encoder.has_template else prompt)])[0]
