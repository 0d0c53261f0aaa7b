"""The one place where text becomes ids, so that SFT, rollout, log-probs and evaluation see the same ids for a row.

Beginning of sequence (BOS). A sequence starts with the special tokens that the tokenizer's own post-processor puts
before a text. Where it puts none, but the tokenizer has a BOS token of its own (not also its EOS, and not the marker
that its chat template opens every turn with), the sequence starts with that. Either way exactly once: not doubled where
a template or a text writes it too, not missing where a fallback template forgets it. An EOS that the post-processor
would append to a prompt is left out, since the model has yet to answer.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.schema import Conversation
from engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]


def load_tokenizer(folder: str, chat_template: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder (or Hub id), with `chat_template` where it has none of its own.

    The template becomes part of the tokenizer and is saved with it. Raises DataError if there is no tokenizer to load
    or the template is no valid Jinja.
    """
    import jinja2
    from transformers import AutoTokenizer

    local = Path(folder).exists()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=local)
    except (OSError, ValueError) as error:
        raise DataError(
            f"no tokenizer can be loaded from {folder}: {error}",
            remedy="model.source must hold tokenizer.json and tokenizer_config.json.",
        ) from error
    if tokenizer.chat_template is None and chat_template is not None:
        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(chat_template)
        except jinja2.TemplateError as error:
            raise DataError(f"model.chat_template is not a valid Jinja template: {error}") from error
        tokenizer.chat_template = chat_template
    return tokenizer


class PromptRefused(ValueError):
    """The chat template raised on a conversation (an order of roles it does not allow, a missing value), or the tokenizer
    on a text (a character that its vocabulary lacks)."""


class PromptEncoder:
    """Renders prompts and turns text into ids with one tokenizer. Safe to share between all stages of a run."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.prefix = _special_prefix(tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered at all."""
        return self.tokenizer.chat_template is not None

    def render(self, prompt: str | Conversation) -> str:
        """The text before the answer: plain text as it is, a conversation with its generation prompt."""
        if isinstance(prompt, str):
            return prompt
        return self._apply(prompt, add_generation_prompt=True)

    def encode(self, texts: list[str]) -> list[Ids]:
        """Ids of rendered texts, each beginning with the special prefix exactly once; PromptRefused if one has no ids."""
        if not texts:
            return []
        return [self._with_prefix(tuple(ids)) for ids in self._bare(texts)]

    def encode_completion(self, prompt: str | Conversation, text: str, ids: Ids, completion: str) -> Ids:
        """Ids of a completion after the prompt of this rendered text and these ids; ends with EOS, which occurs once.

        The assistant turn is rendered by the template where that continues the prompt's rendering; else it is the text
        itself. Prompt and completion are tokenised together only where that leaves the prompt's ids as they are.
        """
        whole = self._whole(prompt, text, completion)
        joint = self.encode([whole])[0]
        if joint[: len(ids)] == ids and len(joint) > len(ids):
            return self._until_eos(joint[len(ids) :])
        return self._until_eos(tuple(self._bare([whole[len(text) :]])[0]))

    def generation_prompt(self, conversation: Conversation) -> Ids:
        """Ids of what the template adds after the last message to open the assistant's turn."""
        opened = self._apply(conversation, add_generation_prompt=True)
        closed = self._apply(conversation, add_generation_prompt=False)
        return tuple(self._bare([opened.removeprefix(closed)])[0]) if opened.startswith(closed) else ()

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def keep_end(self, ids: Ids, limit: int) -> Ids:
        """The special prefix and the last ids, at most `limit` in all."""
        return self.prefix + ids[len(ids) - (limit - len(self.prefix)) :]

    def _apply(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        import jinja2

        if self.system_prompt is not None and all(turn["role"] != "system" for turn in conversation):
            conversation = [{"role": "system", "content": self.system_prompt}, *conversation]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except jinja2.TemplateError as error:
            raise PromptRefused(f"the chat template refuses the conversation: {error}") from error

    def _whole(self, prompt: str | Conversation, text: str, completion: str) -> str:
        if isinstance(prompt, str):
            return text + completion
        whole = self._apply([*prompt, {"role": "assistant", "content": completion}], add_generation_prompt=False)
        return whole if whole.startswith(text) else text + completion

    def _bare(self, texts: list[str]) -> list[list[int]]:
        # verbose=False: no warning about a model's context length, which the configured limit decides
        try:
            return list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        except Exception as error:  # the tokenizer library raises nothing more specific
            raise PromptRefused(f"the tokenizer refuses the text: {error}") from error

    def _with_prefix(self, ids: Ids) -> Ids:
        size = len(self.prefix)
        while size and ids[:size] == self.prefix:
            ids = ids[size:]
        return self.prefix + ids

    def _until_eos(self, ids: Ids) -> Ids:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                f"the tokenizer in {self.tokenizer.name_or_path} has no EOS token, so no completion can end",
                remedy="Set eos_token in its tokenizer_config.json.",
            )
        return (*ids[: ids.index(eos)], eos) if eos in ids else (*ids, eos)


def _special_prefix(tokenizer: "PreTrainedTokenizerBase") -> Ids:
    own: Ids = tuple(tokenizer("", add_special_tokens=True)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if own and own[-1] == eos and (len(own) > 1 or bos != eos):
        own = own[:-1]
    if own:
        return own
    if bos is None or bos == eos or _opens_turns(tokenizer):
        return ()
    return (bos,)


def _opens_turns(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template opens every turn with the BOS token (vocabularies that name `<|im_start|>` BOS)."""
    import jinja2

    if tokenizer.chat_template is None:
        return False
    conversation = [{"role": "user", "content": "-"}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError:
        return False  # a template that wants other roles; nothing is known against the BOS
    bos, rest = str(tokenizer.bos_token), str(text)
    while rest.startswith(bos):
        rest = rest.removeprefix(bos)
    return bos in rest
