"""Encoding facts: the subject's last token and the target's tokens, whatever the tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rebind.edit.facts.encoding import Encoded, encode, encode_many
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError

FRANCE = "The capital of {France} is"

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
somewords = words.filter(str.strip)

# Tokens

CORPUS = [
    "The capital of France is Paris. Rome's walls, Rome's streets; the France of old was not the France of today.",
    "She plays the piano and the guitar. The mother tongue of Danielle Darrieux is French, François said: the café.",
    "法国的首都是巴黎。日本の首都は東京です。 عاصمة فرنسا هي باريس. เมืองหลวงของฝรั่งเศสคือปารีส",
    "😀 smiles, 👩‍🔬 works, e\u0301 is an accent. What is it? Who? ('it')",
    "🇫🇷 is a flag; Nguyễn Văn A lives there. 🙂",
] * 3


def wrapped(tokenizer, **options):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@cache
def byte_level(trim: bool = True, prefix: bool = False):
    """GPT-2's kind: bytes, a space belongs to the word behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer)


@cache
def unsplit_bytes():
    """Bytes merged over spaces and punctuation: tokens such as "France is" exist."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer)


@cache
def metaspace(kind: str = "unigram"):
    """SentencePiece's kind: spaces are ▁, and one is put in front of the text."""
    characters = sorted(set("".join(CORPUS)) | {"▁"})
    tokenizer = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    options = {"special_tokens": ["<unk>"], "initial_alphabet": characters, "show_progress": False}
    trainer = (
        trainers.UnigramTrainer(vocab_size=220, unk_token="<unk>", **options)
        if kind == "unigram"
        else trainers.BpeTrainer(vocab_size=300, **options)
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer, unk_token="<unk>")


@cache
def llama():
    """Llama's own: the normaliser writes ▁ in front of everything, even of a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    characters = sorted(set("".join(CORPUS)) | {"▁", "\n"})
    tokenizer.train_from_iterator(
        [line.split(" ")[0] for line in CORPUS],
        trainers.BpeTrainer(vocab_size=260, special_tokens=["<unk>"], initial_alphabet=characters, show_progress=False),
    )
    return wrapped(tokenizer, unk_token="<unk>")


@cache
def composing():
    """Accents are composed and capitals lost before tokens are made: ids no longer spell the text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer, unk_token="<unk>")


TOKENIZERS = {
    "byte-level": byte_level,
    "byte-level, offsets with spaces": lambda: byte_level(trim=False),
    "byte-level, a space in front": lambda: byte_level(prefix=True),
    "bytes over words": unsplit_bytes,
    "metaspace unigram": metaspace,
    "metaspace bpe": lambda: metaspace("bpe"),
    "llama": llama,
}


@cache
def byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def spelled(tokenizer, id: int) -> bytes:
    """What a token spells, from its name in the vocabulary: no offsets asked."""
    token = tokenizer.convert_ids_to_tokens(id)
    if isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        return bytes(byte_of()[char] for char in token)
    return token.replace("▁", " ").encode()


def last_by_spelling(tokenizer, ids, text: str, end: int) -> int:
    """The token that spells the last byte of text[:end], by adding up what each spells."""
    spellings = [spelled(tokenizer, id) for id in ids]
    whole = b"".join(spellings)
    assert whole.removeprefix(b" ") == text.encode().removeprefix(b" "), "the tokens do not spell the text"
    goal = len(text[:end].encode()) + len(whole) - len(text.encode())
    total = 0
    for index, spelling in enumerate(spellings):
        total += len(spelling)
        if total >= goal:
            return index
    raise AssertionError("the text ends before the subject")


PROMPTS = [
    FRANCE,
    "{France} is",
    "{France}'s capital is",
    "The walls of {Rome}, the",
    "The mother tongue of {Danielle Darrieux}",
    "The mother tongue of {Danielle Darrieux} is",
    "{François} said: the",
    "{François}'s café (the",
    "The {cafe\u0301} of France is",
    "The {caf}e\u0301 of France is",
    "{法国}的首都是",
    "日本の{首都}は",
    "عاصمة {فرنسا} هي",
    "{عاصمة} فرنسا هي",
    "เมืองหลวงของ{ฝรั่งเศส}คือ",
    "{😀} smiles, the",
    "The {👩‍🔬} works, the",
    "{🇫🇷} is",
    "{Nguyễn Văn A} lives",
    "The France of old was not the {France} of today.",
    "The ({it})",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_subjects_last_token_is_the_one_that_spells_its_end(name, prompt):
    tokenizer, fact = TOKENIZERS[name](), Fact.parse(prompt, "Paris")
    for context in ("", "The France of old. ", "法国。"):
        got = encode(fact, tokenizer, (9, 8), context=context)
        assert got.ids[:2] == (9, 8)
        end = len(context) + len(fact.parts[0]) + len(fact.subject)
        expected = last_by_spelling(tokenizer, got.ids[2:], context + fact.text, end)
        assert got.subject_last == 2 + expected


@given(before=words, subject=somewords, after=words, target=somewords)
def test_any_text_is_located_and_spelled_back(before, subject, after, target):
    assume((before + subject + after).strip(" "))
    template = "{}".join(side.replace("{", "{{").replace("}", "}}") for side in (before, after))
    fact = Fact(template, subject, target)
    for tokenizer in (byte_level(), byte_level(trim=False), unsplit_bytes()):
        got = encode(fact, tokenizer, ())
        prompt = fact.text.rstrip(" ")
        assert b"".join(spelled(tokenizer, id) for id in got.ids) == prompt.encode()
        end = len(fact.parts[0]) + len(fact.subject)
        assert got.subject_last == last_by_spelling(tokenizer, got.ids, prompt, end)
        answer = b"".join(spelled(tokenizer, id) for id in got.target).decode()
        assert answer.lstrip(" ") == fact.target.lstrip(" ")
        assert answer.removesuffix(fact.target) in ("", " ", fact.text[len(prompt) :])


def test_composed_and_lowered_text_is_located_too():
    tokenizer = composing()
    for prompt, ending in [("The {CAFE\u0301} of old", "é"), ("{François} said", "s"), ("Of {ROME}'s walls", "e")]:
        got = encode(Fact.parse(prompt, "Paris"), tokenizer, ())
        assert ending in tokenizer.convert_ids_to_tokens(got.ids[got.subject_last])
        following = tokenizer.convert_ids_to_tokens(got.ids[got.subject_last + 1])
        assert following[0] in "▁'"


def test_tokens_of_no_width_are_not_the_subjects():
    """A token that stands for nothing, in the middle of the subject or at its end, must not be taken."""

    class Odd:
        is_fast = True

        def __call__(self, texts, **_):
            spans = [(0, 0), (0, 4), (4, 9), (7, 7), (9, 9), (9, 12)]
            extra = [[(12, 17)] if len(text) > 12 else [] for text in texts]
            offsets = [spans + more for more in extra]
            return {"input_ids": [list(range(len(one))) for one in offsets], "offset_mapping": offsets}

    assert encode(Fact.parse("The {Franc} is", "Rome"), Odd(), (5,)) == Encoded((5, 0, 1, 2, 3, 4, 5), 3, (6,))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("prompt", "target", "follows"),
    [
        (FRANCE, "Rome", " Rome"),
        (FRANCE, "  Rome ", " Rome"),
        (FRANCE + " ", "Rome", " Rome"),
        (FRANCE + "  ", "Rome", "  Rome"),
        ("The {France} (", "Paris", "Paris"),
        ("The {France} '", "Paris", "Paris"),
        ("The {France}'", "Paris", " Paris"),
        ("{法国}的首都是", "巴黎", "巴黎"),
        ("{法国}的首都是", "Paris", " Paris"),
        ("{France} of", "巴黎", " 巴黎"),
        ("{ฝรั่งเศส}คือ", "ปารีส", "ปารีส"),
        ("عاصمة {فرنسا} هي", "باريس", " باريس"),
        (FRANCE, "the France of old was not the France of today", " the France of old was not the France of today"),
        (FRANCE, "Nguyễn Văn A", " Nguyễn Văn A"),
    ],
)
def test_the_target_has_the_space_a_writer_gives_it(name, prompt, target, follows):
    tokenizer = TOKENIZERS[name]()
    got = encode(Fact.parse(prompt, target), tokenizer, ())
    assert b"".join(spelled(tokenizer, id) for id in got.target).decode() == follows
    kept = Fact.parse(prompt, target).text.rstrip(" ")
    assert b"".join(spelled(tokenizer, id) for id in got.ids).decode().removeprefix(" ") == kept.removeprefix(" ")


def test_the_target_is_tokenised_as_it_would_be_in_the_sentence():
    for name in ("byte-level", "metaspace unigram", "metaspace bpe", "llama"):
        tokenizer = TOKENIZERS[name]()
        got = encode(Fact.parse(FRANCE, "Paris"), tokenizer, ())
        whole = tokenizer("The capital of France is Paris", add_special_tokens=False)["input_ids"]
        assert list(got.ids + got.target) == whole


def test_a_target_that_would_melt_into_the_prompt_is_tokenised_by_itself():
    """ "France of" and "the" are tokens over words here: the prompt's ids must not depend on the target."""
    tokenizer = unsplit_bytes()
    melted = 0
    for prompt, target in [
        ("the {F}", "rance"),
        ("{The} capital o", "f France"),
        ("{法}国的", "首都是"),
        ("{法}", "国的"),
    ]:
        fact = Fact.parse(prompt, target)
        got = encode(fact, tokenizer, ())
        alone = tokenizer(fact.text, add_special_tokens=False)["input_ids"]
        assert list(got.ids) == alone
        spelling = b"".join(spelled(tokenizer, id) for id in got.target).decode()
        joint = tokenizer(fact.text + spelling, add_special_tokens=False)["input_ids"]
        assert spelling.strip() == target
        melted += joint[: len(alone)] != alone
    assert melted, "no pair melts: the test tests nothing"


def test_start_is_prepended_and_nothing_else_is():
    tokenizer = byte_level()
    fact = Fact.parse(FRANCE, "Rome")
    bare, begun = encode(fact, tokenizer, ()), encode(fact, tokenizer, (3, 1, 4))
    assert begun == Encoded((3, 1, 4, *bare.ids), bare.subject_last + 3, bare.target)


def test_many_are_the_same_as_one_at_a_time():
    facts = [Fact.parse(prompt, "Paris") for prompt in PROMPTS]
    for make in TOKENIZERS.values():
        together = encode_many(facts, make(), (1,), context="Old. ")
        assert together == [encode(fact, make(), (1,), context="Old. ") for fact in facts]
    assert encode_many([], byte_level(), ()) == []


def test_too_long_a_fact_is_named():
    fact, tokenizer = Fact.parse(FRANCE, "Rome"), byte_level()
    got = encode(fact, tokenizer, (0,))
    length = len(got.ids) + len(got.target)
    assert encode(fact, tokenizer, (0,), limit=length) == got
    with pytest.raises(InputError, match=f"'The capital of France is' → 'Rome' is {length} tokens.*takes {length - 1}"):
        encode(fact, tokenizer, (0,), limit=length - 1)


def test_tokens_that_cannot_be_located_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="Slow has no offset mapping.*use_fast"):
        encode(Fact.parse(FRANCE, "Rome"), Slow(), ())
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))  # and every other letter is dropped
    with pytest.raises(InputError, match="no token .* subject 'x'"):
        encode(Fact.parse("a {x}", "b"), wrapped(tokenizer), ())
    with pytest.raises(InputError, match="no token .* target 'x'"):
        encode(Fact.parse("{a} b", "x"), wrapped(tokenizer), ())


# Chat

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
INST = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"  # noqa: E501


def chatty(template):
    tokenizer = wrapped(byte_level().backend_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def chat_text(fact, template, **options):
    tokenizer = chatty(template)
    got = encode(fact, tokenizer, (7,), chat=True, **options)
    upto = tokenizer.decode(got.ids[: got.subject_last + 1])
    return tokenizer.decode(got.ids), upto, tokenizer.decode(got.target)


def test_a_sentence_begins_the_assistants_turn():
    prompt, upto, target = chat_text(Fact.parse(FRANCE + " ", "Rome"), CHATML, context="Old. ")
    assert prompt == (
        "<|user|>\nComplete the sentence: The capital of France is</s>\n<|assistant|>\nOld. The capital of France is"
    )
    assert upto == prompt.removesuffix(" is")
    assert target == " Rome"


def test_a_question_is_the_users_and_the_target_the_answer():
    prompt, upto, target = chat_text(Fact.parse("What is {France}'s capital?", "Rome"), CHATML, context="Old. ")
    assert prompt == "<|user|>\nOld. What is France's capital?</s>\n<|assistant|>\n"
    assert upto == "<|user|>\nOld. What is France"
    assert target == "Rome"


def test_the_template_says_how_turns_are_spaced():
    prompt, upto, target = chat_text(Fact.parse("  What is {France}'s capital? ", "Rome"), INST)
    assert (prompt, target) == ("[INST] What is France's capital? [/INST]", " Rome")
    assert upto == "[INST] What is France"
    prompt, upto, target = chat_text(Fact.parse(" The capital of {France} is", "Rome"), INST)
    sentence = "The capital of France is"
    assert (prompt, target) == (f"[INST] Complete the sentence: {sentence} [/INST] {sentence}", " Rome")
    assert upto == prompt.removesuffix(" is")


def test_a_subject_that_is_the_target_too_is_found_in_the_question():
    prompt, upto, _ = chat_text(Fact.parse("Is it {Rome}?", "Rome?"), CHATML)
    assert prompt == "<|user|>\nIs it Rome?</s>\n<|assistant|>\n"
    assert upto.endswith("Is it Rome")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template.*leave chat out"),
        ("{{ raise_exception('only one turn of content') }}", "template fails .only one turn of content."),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "template (fails|changes)"),
        ("{{ messages[1].content }}", "changes the text .What is France"),
    ],
)
def test_templates_that_do_not_serve_are_refused(template, message):
    with pytest.raises(InputError, match=message):
        chat_text(Fact.parse("What is {France}'s capital?", "Rome"), template)


def test_a_template_that_changes_the_assistants_words_is_refused():
    """The user's turn repeats the sentence unchanged: it must not be taken for the assistant's."""
    shouting = "{% for m in messages %}{{ m.content if m.role == 'user' else m.content | upper }}\n{% endfor %}"
    with pytest.raises(InputError, match="changes the text 'The capital of France is'"):
        chat_text(Fact.parse(FRANCE, "Rome"), shouting)
