"""Makes the model folders of the addition presets: architecture, character tokenizer and chat template, no weights.

Run from the repository root: python deployments/presets/models/make_models.py
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent
PAD, BOS, EOS, TURN = "<pad>", "<s>", "</s>", "<|assistant|>"
VOCABULARY = {token: index for index, token in enumerate([PAD, BOS, EOS, *"0123456789+=", TURN])}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + TURN + "{{ message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + TURN + "{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """One token per character; the template writes BOS once, opens every answer with its mark and ends it with EOS."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, hidden: int, layers: int, spread: float) -> None:
    """A Llama of this width; heads of 32, the least that vLLM's CPU attention takes."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=spread,
        tie_word_embeddings=False,
        **ids,
    )
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)
    save_tokenizer(folder)


if __name__ == "__main__":
    save_model(HERE / "addition", hidden=128, layers=2, spread=0.06)
    save_model(HERE / "smoke", hidden=64, layers=1, spread=0.08)
