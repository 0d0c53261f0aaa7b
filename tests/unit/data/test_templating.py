"""Text to ids with real small tokenizers: one BOS, one EOS, and the prompt's ids the same wherever they are used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.templating import PromptEncoder, PromptRefused, load_tokenizer
from engine.errors import DataError
from tests.helpers.tokenizers import (
    TURNS,
    TURNS_WITH_BOS,
    char_tokenizer,
    merging_tokenizer,
    save_tokenizer,
)

USER = [{"role": "user", "content": "2+2?"}]
BOS, EOS = 1, 2


def encode(encoder: PromptEncoder, prompt) -> tuple[int, ...]:
    return encoder.encode([encoder.render(prompt)])[0]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("template", [TURNS, TURNS_WITH_BOS, "{{ bos_token }}" + TURNS_WITH_BOS])
@pytest.mark.parametrize("prompt", ["2+2?", "<s>2+2?", USER])
def test_exactly_one_bos_at_the_start_and_no_eos_at_the_end(adds_bos, adds_eos, template, prompt):
    encoder = PromptEncoder(char_tokenizer(template=template, adds_bos=adds_bos, adds_eos=adds_eos))
    ids = encode(encoder, prompt)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert EOS not in ids
    assert len(ids) > 4


@pytest.mark.parametrize("prompt", ["2+2?", USER])
def test_no_bos_where_the_tokenizer_has_none(prompt):
    assert BOS not in encode(PromptEncoder(char_tokenizer(bos=False, template=TURNS)), prompt)


def test_a_bos_that_is_also_the_eos_is_not_put_before_a_text_unless_the_tokenizer_does_it():
    tokenizer = char_tokenizer()
    tokenizer.bos_token = "</s>"
    assert encode(PromptEncoder(tokenizer), "2+2?") == tuple(tokenizer("2+2?")["input_ids"])
    assert encode(PromptEncoder(char_tokenizer(adds_bos=True)), "2+2?")[0] == BOS


def test_a_bos_that_opens_every_turn_is_a_marker_and_not_a_beginning():
    template = (
        "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    encoder = PromptEncoder(char_tokenizer(template=template))
    assert encode(encoder, "2+2?")[0] != BOS
    assert encode(encoder, USER).count(BOS) == 2


def test_plain_prompts_are_tokenised_as_they_are():
    tokenizer = char_tokenizer(template=TURNS)
    assert encode(PromptEncoder(tokenizer), "2+2?\n")[1:] == tuple(tokenizer.convert_tokens_to_ids(list("2+2?\n")))


def test_conversations_end_with_the_generation_prompt():
    encoder = PromptEncoder(char_tokenizer(template=TURNS))
    opening = encoder.generation_prompt(USER)
    assert encoder.decode(opening) == "[assistant]"
    assert encode(encoder, USER)[-len(opening) :] == opening


def test_the_system_prompt_goes_before_conversations_that_have_none():
    encoder = PromptEncoder(char_tokenizer(template=TURNS), system_prompt="Be brief.")
    assert encoder.render(USER).startswith("[system]Be brief.\n[user]2+2?")
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert encoder.render(own) == PromptEncoder(encoder.tokenizer).render(own)
    assert encoder.render("2+2?") == "2+2?"


def test_a_template_that_refuses_a_conversation_says_why():
    tokenizer = char_tokenizer(template="{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(PromptRefused, match="Roles must alternate"):
        PromptEncoder(tokenizer).render(USER)


# --- completions -----------------------------------------------------------------------------------------------------


def completion(encoder: PromptEncoder, prompt, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    text = encoder.render(prompt)
    ids = encoder.encode([text])[0]
    return ids, encoder.encode_completion(prompt, text, ids, answer)


@pytest.mark.parametrize("make", [char_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("template", [TURNS, TURNS_WITH_BOS])
@pytest.mark.parametrize("prompt", ["2+2=", USER])
def test_a_completion_ends_with_one_eos_and_holds_no_bos(make, template, prompt):
    encoder = PromptEncoder(make(template=template))
    _, answer = completion(encoder, prompt, "4")
    assert answer[-1] == EOS
    assert answer.count(EOS) == 1
    assert BOS not in answer
    assert encoder.decode(answer) == "4</s>"


@pytest.mark.parametrize("text", ["4", "44", "4 = 2+2"])
def test_prompt_and_completion_are_not_merged_into_one_token(text):
    tokenizer = merging_tokenizer()
    assert len(tokenizer("2+2=" + text)["input_ids"]) == len("2+2=" + text) - 1  # the whole text alone would merge `=4`
    ids, answer = completion(PromptEncoder(tokenizer), "2+2=", text)
    assert ids == encode(PromptEncoder(tokenizer), "2+2=")
    assert answer == (*tokenizer(text)["input_ids"], EOS)


def test_a_template_that_rewrites_earlier_turns_leaves_the_completion_as_text():
    template = "{{ messages | length }}" + TURNS  # the rendering with the answer does not begin with the prompt's
    encoder = PromptEncoder(char_tokenizer(template=template))
    _, answer = completion(encoder, USER, "4")
    assert encoder.decode(answer) == "4</s>"


def test_the_turn_is_closed_as_the_template_closes_it():
    template = TURNS.replace("{{ eos_token }}", "[end]")
    encoder = PromptEncoder(char_tokenizer(template=template))
    assert encoder.decode(completion(encoder, USER, "4")[1]) == "4[end]\n</s>"


def test_without_an_eos_no_completion_can_end():
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        completion(PromptEncoder(tokenizer), "2+2=", "4")


@pytest.mark.parametrize("make", [char_tokenizer, merging_tokenizer])
@settings(deadline=None, max_examples=50)  # a deadline would measure the machine
@given(prompt=st.text("=4ab \n", min_size=1, max_size=6), answer=st.text("=4ab \n", min_size=1, max_size=6))
def test_prompt_ids_do_not_depend_on_what_follows(make, prompt, answer):
    encoder = ENCODERS[make.__name__]
    ids, target = completion(encoder, prompt, answer)
    assert ids == encoder.encode([prompt])[0]
    assert encoder.decode(target) == answer + "</s>"


ENCODERS = {make.__name__: PromptEncoder(make()) for make in (char_tokenizer, merging_tokenizer)}


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_fallback_template_is_used_and_saved_with_the_tokenizer(tmp_path):
    save_tokenizer(char_tokenizer(), tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"), TURNS)
    ids = encode(PromptEncoder(tokenizer), USER)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"), None).chat_template == TURNS


def test_the_tokenizers_own_template_wins(tmp_path):
    save_tokenizer(char_tokenizer(template=TURNS_WITH_BOS), tmp_path)
    assert load_tokenizer(str(tmp_path), "other").chat_template == TURNS_WITH_BOS


def test_ids_are_the_same_after_saving_and_loading(tmp_path):
    tokenizer = char_tokenizer(template=TURNS_WITH_BOS, adds_bos=True)
    save_tokenizer(tokenizer, tmp_path)
    before, after = PromptEncoder(tokenizer), PromptEncoder(load_tokenizer(str(tmp_path), None))
    assert [encode(before, prompt) for prompt in ("2+2?", USER)] == [encode(after, prompt) for prompt in ("2+2?", USER)]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=f"no tokenizer can be loaded from {tmp_path}"):
        load_tokenizer(str(tmp_path), None)


def test_a_template_with_a_mistake_is_found_at_once(tmp_path):
    save_tokenizer(char_tokenizer(), tmp_path)
    with pytest.raises(DataError, match=r"model\.chat_template is not a valid Jinja template"):
        load_tokenizer(str(tmp_path), "{% for m in messages %}")
