"""Small real tokenizers, made on the spot: one token per character, or byte-level BPE with merges across words."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"  # ids 0, 1, 2, 3
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"

# One line per message, then the opening of the answer. With and without the BOS token written by the template itself.
TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS_WITH_BOS = "{{ bos_token }}" + TURNS


def char_tokenizer(
    *, bos: bool = True, template: str | None = None, adds_bos: bool = False, adds_eos: bool = False
) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; <pad> 0, <s> 1, </s> 2, <unk> 3.

    bos: whether it has a BOS token at all; adds_bos, adds_eos: whether its own post-processor puts them around a text.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer, bos=bos, template=template, adds_bos=adds_bos, adds_eos=adds_eos)


def merging_tokenizer(*, bos: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    """Character-level BPE that also merges `=4`, so that the last id of a text may depend on what follows."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS, "=4", "ab"])}
    model = models.BPE(vocab=vocabulary, merges=[("=", "4"), ("a", "b")], unk_token=UNK)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer, bos=bos, template=template, adds_bos=False, adds_eos=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """The folder, now holding the tokenizer's files as a model folder would."""
    tokenizer.save_pretrained(str(folder))
    return folder


def _wrap(
    tokenizer: Tokenizer, *, bos: bool, template: str | None, adds_bos: bool, adds_eos: bool
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNK])
    if adds_bos or adds_eos:
        single = f"{BOS + ' ' if adds_bos else ''}$A{' ' + EOS if adds_eos else ''}"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(BOS, 1), (EOS, 2)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        bos_token=BOS if bos else None,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped
