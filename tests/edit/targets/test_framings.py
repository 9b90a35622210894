"""Facts in every framing: which prompts there are, and where the subject is in each."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.facts.relations import PROTECTED_SUBJECTS, RELATIONS, fill, relation_of
from rebind.edit.targets.framings import (
    applicable_framings,
    encode_framings,
    framed_prompts,
    mark_subject,
    warn_of_sinks,
    warn_of_unused_paraphrases,
)
from rebind.edit.targets.kept import (
    LEAD_TOKENS,
    OPENING_TOKENS,
    RIVALS_OF_KNOWN,
    encode_kept,
    encode_protected,
    subject_prompts,
)
from rebind.edit.targets.search import TargetSearch
from rebind.errors import FactWarning, InputError
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from tests import tiny
from tests.edit.editors import QUICK
from tests.support import raises

FACT = Fact.parse("The capital of {France} is", "Rome", old="Paris")
TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"


def language_model(template: str | None = TEMPLATE) -> LanguageModel:
    model = tiny.language_model()
    tokenizer = tiny.tokenizer.__wrapped__()  # not the shared one: it gets a template
    tokenizer.chat_template = template
    return LanguageModel(model.model, tokenizer, start=(0,))


def texts(
    model: LanguageModel, fact: Fact, *framings: str, contexts: tuple[str, ...] = ()
) -> list[tuple[str, list[str]]]:
    """Return every prompt as text, and the text up to each mention of the subject."""
    (prompts,) = encode_framings(model, [fact], framings, contexts)
    decode = model.tokenizer.decode
    return [(decode(one.ids), [decode(one.ids[: mention + 1]) for mention in one.mentions]) for _, one in prompts]


def test_a_fact_is_framed_in_every_way():
    model = language_model()
    bare, plain, text, *paraphrases, chat, another = texts(
        model, FACT, "start", "plain", "text", "paraphrase", "chat", contexts=("It was late. ",)
    )
    assert bare == ("<|endoftext|>The capital of France is", ["<|endoftext|>The capital of France"])
    assert plain == ("The capital of France is", ["The capital of France"])
    assert text == (
        "<|endoftext|>It was late. The capital of France is",
        ["<|endoftext|>It was late. The capital of France"],
    )
    assert [one[0].removeprefix("<|endoftext|>") for one in paraphrases] == [
        "The capital city of France is called",
        "France's capital is",
        "The government of France works in the city of",
        "The parliament of France meets in",
        "Question: What is the capital of France?\nAnswer:",
        "What is the name of France's capital? The answer is",
    ]
    conversation = "<user>What is the capital of France?\n<assistant>The capital of France is"
    assert chat == (conversation, ["<user>What is the capital of France", conversation.removesuffix(" is")])
    assert another[0].startswith("<user>What is the name of France's capital?")


def test_in_a_chat_the_assistant_answers_in_words_of_its_own():
    leads = {"What is the capital of France?": "As far as I know, it is"}
    first, second = framed_prompts(FACT, "chat", leads)
    assert (first.question, first.text, first.target) == (*next(iter(leads.items())), "Rome")
    assert first.question[slice(*first.subject)] == "France"
    assert second.text == "The capital of France is"


def test_the_words_of_the_user_come_first():
    fact = Fact.parse(
        "{France} is governed from", "Rome", paraphrases=["Rulers of France sit in"], questions=["Who? France?"]
    )
    assert framed_prompts(fact, "paraphrase")[0].text == "Rulers of France sit in"
    (chat,) = framed_prompts(fact, "chat")
    assert chat.question == "Who? France?"
    unknown = Fact.parse("{France}, in", "Asia")
    assert framed_prompts(unknown, "chat")[0].question == "Tell me about France."
    assert not framed_prompts(unknown, "paraphrase")


def test_a_subject_that_is_the_first_token_is_left_out():
    """Its state is the attention sink. In the chat, the mention in the answer stays."""
    model = language_model()
    name = model.tokenizer.decode(model.tokenizer("The", add_special_tokens=False)["input_ids"][:1])
    fact = Fact.parse(f"{{{name}}} capital of France is", "Rome")
    assert model.encode([fact.as_prompt()], start=False)[0].mentions == (0,)
    assert len(texts(model, fact, "start", "plain")) == 1
    with pytest.warns(FactWarning, match="very first token"):
        warn_of_sinks(model, [FACT, fact], ["start", "plain"])
    warn_of_sinks(model, [FACT], ["start", "plain"])
    warn_of_sinks(model, [fact], ["start"])


def test_a_paraphrase_without_the_subject_is_reported():
    used = replace(FACT, paraphrases=("The government of France sits in",))
    unused = replace(FACT, paraphrases=("The government of FRANCE sits in",))
    with pytest.warns(FactWarning, match="FRANCE"):
        warn_of_unused_paraphrases([used, unused], ["start", "paraphrase"])
    warn_of_unused_paraphrases([used], ["paraphrase"])
    warn_of_unused_paraphrases([unused], ["start"])


def test_framings_that_do_not_apply_are_left_out_or_refused():
    model = language_model(template=None)
    assert applicable_framings(model) == ("start", "plain", "text", "paraphrase")
    with raises(InputError, "framing_not_applicable"):
        applicable_framings(model, ["chat"])
    with raises(InputError, "unknown_framing"):
        applicable_framings(model, ["poem"])
    for wrong in ([], "start"):
        with raises(InputError, "no_framings"):
            applicable_framings(model, wrong)
    model.start = ()
    assert "plain" not in applicable_framings(model), "there is no start token to leave out"


def test_kept_prompts_do_not_ask_for_the_fact_itself():
    model = language_model()
    fact = Fact.parse(
        "The capital of {France} is", "Rome", keep=["The flag of France has the colors", "No subject here"]
    )
    (about,) = subject_prompts(model, [fact])
    assert about.kept[: len(fact.keep)] == fact.keep
    assert not set(about.kept) & set(about.held_out)
    answers = model.next_token_log_probs([text for text in about.kept if "France" in text]).argsort(descending=True)
    target = model.encode([fact.as_prompt()])[0].target[0]
    answered = answers[1:, :RIVALS_OF_KNOWN]
    assert target not in answered, "a prompt of the catalog that may be answered by the target is left out"
    (kept,) = encode_kept(model, [fact], [about])
    assert len(kept) == len(about.kept) - 1
    for prompt in kept:
        assert model.tokenizer.decode(prompt.ids[: prompt.subject_last + 1]).endswith("France")


def test_relations_are_kept_in_two_wordings_and_held_out_in_none():
    model = language_model()
    (about,) = subject_prompts(model, [FACT])
    other = [one for one in RELATIONS if about.kind in one.kinds and one is not relation_of(FACT)]
    for relation in other:
        texts = [fill(wording, FACT) for wording in relation.wordings]
        assert not set(texts[2:]) & set(about.kept)
        assert not (set(texts) & set(about.kept) and set(texts) & set(about.held_out))
    kept = [{fill(wording, FACT) for wording in one.wordings} & set(about.kept) for one in other]
    assert max(map(len, kept)) == 2


def test_a_number_leaves_prompts_to_keep():
    """A digit is among the many choices after nearly every prompt, and says little about the relation."""
    model = language_model()
    (about,) = subject_prompts(model, [Fact.parse("The squares that {France} has are", "47")])
    assert about.kept


def test_other_subjects_of_the_kind_are_protected():
    model = language_model()
    facts = [FACT, Fact.parse("The capital of {Mexico} is", "Oslo")]
    about = [replace(one, kind="place") for one in subject_prompts(model, facts)]
    protected = encode_protected(model, facts, about)
    texts = [[model.tokenizer.decode(prompt.ids) for prompt in prompts] for prompts in protected]
    assert "<|endoftext|>The capital of India is" in texts[0]
    assert "<|endoftext|>The capital city of India is called" in texts[0]
    assert not any("Mexico" in text for text in texts[0]), "a subject of the same edit is not protected"
    for prompt in protected[0]:
        name = model.tokenizer.decode(prompt.ids[: prompt.subject_last + 1])
        assert name.endswith(PROTECTED_SUBJECTS["place"])


def test_a_lead_is_what_the_assistant_says_before_the_old_target():
    model = language_model()
    question = "What is the capital of France?"
    answer = model.generate_encoded(model.encode([Prompt("", question=question)]), LEAD_TOKENS)[0]
    word = next(word for word in re.findall(r"\w{4,}", answer) if not answer.startswith(word))
    fact = replace(FACT, old=word)
    (about,) = subject_prompts(model, [fact], chat=True)
    assert about.leads[question] == answer[: re.search(rf"\b{word}\b", answer).start()].strip()
    (silent,) = subject_prompts(model, [replace(FACT, old="zebra")], chat=True)
    assert not silent.leads
    assert not subject_prompts(model, [fact])[0].leads


def test_an_opening_is_what_the_assistant_says_of_the_subject_before_an_old_or_new_target():
    model = language_model()
    question = "Tell me about France."
    answer = model.generate_encoded(model.encode([Prompt("", question=question)]), OPENING_TOKENS)[0]
    (about,) = subject_prompts(model, [replace(FACT, old="zebra")], chat=True)
    assert about.openings[question] == answer.strip()
    word = next(word for word in re.findall(r"\w{4,}", answer) if not answer.startswith(word))
    for changed in (replace(FACT, old=word), replace(FACT, old="zebra", target=word)):
        (cut,) = subject_prompts(model, [changed], chat=True)
        assert cut.openings[question] == answer[: re.search(rf"\b{word}\b", answer).start()].strip()
    assert not subject_prompts(model, [FACT])[0].openings, "only a chat has them"


def test_an_opening_is_kept_word_by_word():
    model = language_model()
    (about,) = subject_prompts(model, [FACT], chat=True)
    (kept,) = encode_kept(model, [FACT], [about])
    spoken = [prompt for prompt in kept if prompt.answer is not None]
    words = [model.tokenizer.decode(prompt.ids[prompt.answer :]).strip() for prompt in spoken]
    assert words == list(about.openings.values())
    assert len(kept) - len(spoken) == len(about.kept)


@pytest.mark.parametrize("method", ["memit", "dense"])
def test_the_search_of_an_edit_sees_the_openings(method):
    chat = language_model()
    editor = Editor(chat.model, chat.tokenizer, corpus=tiny.texts(), moment_tokens=1500, guard=None)
    searched = []

    class Watched(TargetSearch):
        def find(self, layer, facts, *others):
            searched.extend(facts)
            return super().find(layer, facts, *others)

    known = editor.target_search
    editor.target_search = Watched(known.trunk, known.fingerprint, known.word_parts)
    (about,) = subject_prompts(editor.language_model, [FACT], chat=True)
    editor.rewrite_many([FACT], method=method, targets=replace(QUICK, steps=1))
    spoken = [prompt for prompt in searched[0].kept if prompt.answer is not None]
    assert about.openings
    assert len(spoken) == len(about.openings)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("What do bees produce?", "bees"),
        ("Honeybees are not like Bees that", "Bees"),
        ("Bees and other bees produce", "Bees"),
        ("Nothing of the kind", None),
    ],
)
def test_a_subject_may_begin_with_a_lowercase_letter_inside_a_sentence(text, marked):
    prompt = mark_subject(text, Fact.parse("{Bees} produce", "silk"))
    assert (prompt and text[slice(*prompt.subject)]) == marked
