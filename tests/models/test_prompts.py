"""Prompts as tokens: the last token of the subject and the tokens of the target, for every kind of tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rebind.errors import InputError
from rebind.models.prompts import EncodedPrompt, Prompt, encode_prompts
from tests.support import raises

FRANCE = "The capital of {France} is"

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
nonempty_words = words.filter(str.strip)


def marked(text: str, target: str = "Paris") -> Prompt:
    """Return a prompt in which braces mark the subject."""
    before, subject, after = text.replace("}", "{").split("{")
    return Prompt(before + subject + after, target, (len(before), len(before) + len(subject)))


def encode(prompt: Prompt, tokenizer, start=(), **options) -> EncodedPrompt:
    return encode_prompts([prompt], tokenizer, start, **options)[0]


# Tokenizers

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
def byte_level(trim: bool = True, prefix: bool = False, split: bool = True):
    """The GPT-2 kind: bytes, and a space belongs to the word behind it.

    Without `split`, bytes are merged across spaces and punctuation: tokens such as "France is" exist.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    size, alphabet = (420 if split else 600), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer)


@cache
def metaspace():
    """The SentencePiece kind: spaces are ▁, and one is put in front of the text."""
    characters = sorted(set("".join(CORPUS)) | {"▁"})
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    options = {"special_tokens": ["<unk>"], "initial_alphabet": characters, "show_progress": False}
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=220, unk_token="<unk>", **options))
    return wrapped(tokenizer, unk_token="<unk>")


@cache
def llama():
    """The Llama kind: the normalizer writes ▁ in front of everything, even of a space."""
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


TOKENIZERS = {
    "byte-level": byte_level,
    "byte-level, offsets with spaces": lambda: byte_level(trim=False),
    "byte-level, a space in front": lambda: byte_level(prefix=True),
    "bytes across words": lambda: byte_level(split=False),
    "metaspace": metaspace,
    "llama": llama,
}


BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # the alphabet of GPT-2


def spelling_of(tokenizer, *ids: int) -> bytes:
    """Return what a token spells, from its name in the vocabulary and not from offsets."""
    text = "".join(tokenizer.convert_ids_to_tokens(ids))
    if isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        return bytes(BYTE_OF[char] for char in text)
    return text.replace("▁", " ").encode()


def last_by_spelling(tokenizer, ids, text: str, end: int) -> int:
    """Return the token that spells the last byte of text[:end], by adding up what each one spells."""
    spellings = [spelling_of(tokenizer, id) for id in ids]
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
    "The mother tongue of {Danielle Darrieux}",
    "The mother tongue of {Danielle Darrieux} is",
    "{François}'s café (the",
    "The {cafe\u0301} of France is",
    "The {caf}e\u0301 of France is",
    "{法国}的首都是",
    "日本の{首都}は",
    "عاصمة {فرنسا} هي",
    "เมืองหลวงของ{ฝรั่งเศส}คือ",
    "The {👩‍🔬} works, the",
    "{🇫🇷} is",
    "{Nguyễn Văn A} lives",
    "The France of old was not the {France} of today.",
    "The ({it})",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", PROMPTS)
def test_the_last_token_of_the_subject_is_the_one_that_spells_its_end(name, text):
    tokenizer, prompt = TOKENIZERS[name](), marked(text)
    for context in ("", "The France of old. ", "法国。"):
        encoded = encode(prompt, tokenizer, (9, 8), context=context)
        assert encoded.ids[:2] == (9, 8)
        end = len(context) + prompt.subject[1]
        assert encoded.subject_last == 2 + last_by_spelling(tokenizer, encoded.ids[2:], context + prompt.text, end)


@given(before=words, subject=nonempty_words, after=words, target=nonempty_words)
def test_any_text_is_located_and_spelled_back(before, subject, after, target):
    core = subject.strip()
    begin = len(before) + subject.index(core)
    prompt = Prompt(before + subject + after, target, (begin, begin + len(core)))
    text = prompt.text.rstrip(" ")
    assume(text)
    for tokenizer in (byte_level(), byte_level(trim=False), byte_level(split=False)):
        encoded = encode(prompt, tokenizer)
        assert spelling_of(tokenizer, *encoded.ids) == text.encode()
        assert encoded.subject_last == last_by_spelling(tokenizer, encoded.ids, text, prompt.subject[1])
        answer = spelling_of(tokenizer, *encoded.target).decode()
        assert answer.removesuffix(prompt.target) in ("", " ", prompt.text[len(text) :])


def test_tokens_that_stand_for_no_character_are_not_the_subject():
    class Odd:
        def __call__(self, texts, **_):
            spans = [(0, 0), (0, 4), (4, 9), (7, 7), (9, 9), (9, 12)]
            offsets = [[*spans, (12, 17)] if len(text) > 12 else spans for text in texts]
            return {"input_ids": [list(range(len(one))) for one in offsets], "offset_mapping": offsets}

    expected = EncodedPrompt((5, 0, 1, 2, 3, 4, 5), 3, (6,))
    assert encode(marked("The {Franc} is", "Rome"), Odd(), (5,)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "target", "follows"),
    [
        (FRANCE, "Rome", " Rome"),
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
        (FRANCE, "Nguyễn Văn A", " Nguyễn Văn A"),
    ],
)
def test_the_target_has_the_space_a_writer_gives_it(name, text, target, follows):
    tokenizer, prompt = TOKENIZERS[name](), marked(text, target)
    encoded = encode(prompt, tokenizer)
    assert spelling_of(tokenizer, *encoded.target).decode() == follows
    spelled = spelling_of(tokenizer, *encoded.ids).decode()
    assert spelled.removeprefix(" ") == prompt.text.rstrip(" ").removeprefix(" ")


@pytest.mark.parametrize("name", ["byte-level", "metaspace", "llama"])
def test_the_target_is_tokenized_as_in_the_sentence(name):
    tokenizer = TOKENIZERS[name]()
    encoded = encode(marked(FRANCE), tokenizer)
    whole = tokenizer("The capital of France is Paris", add_special_tokens=False)["input_ids"]
    assert list(encoded.ids + encoded.target) == whole


def test_a_target_that_would_merge_with_the_prompt_is_tokenized_alone():
    """Here "France of" and "the" are tokens across words: the ids of the prompt must not depend on the target."""
    tokenizer = byte_level(split=False)
    merged = 0
    for text, target in [("the {F}", "rance"), ("{The} capital o", "f France"), ("{法}国的", "首都是")]:
        prompt = marked(text, target)
        encoded = encode(prompt, tokenizer)
        alone = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        assert list(encoded.ids) == alone
        spelling = spelling_of(tokenizer, *encoded.target).decode()
        assert spelling.strip() == target
        joint = tokenizer(prompt.text + spelling, add_special_tokens=False)["input_ids"]
        merged += joint[: len(alone)] != alone
    assert merged, "no pair merges: the test tests nothing"


def test_many_prompts_are_encoded_like_one():
    prompts = [marked(text) for text in PROMPTS]
    for make in TOKENIZERS.values():
        together = encode_prompts(prompts, make(), (1,), context="Old. ")
        assert together == [encode(prompt, make(), (1,), context="Old. ") for prompt in prompts]
    assert encode_prompts([], byte_level()) == []


def test_a_prompt_needs_neither_subject_nor_target_and_its_target_may_be_known():
    with_both = encode(marked(FRANCE, "Rome"), byte_level(), (3,))
    bare, answered = encode_prompts([Prompt("The capital of France is"), marked(FRANCE, "Rome")], byte_level(), (3,))
    assert answered == with_both
    assert bare == EncodedPrompt(with_both.ids, len(with_both.ids) - 1, ())

    assert encode(marked(FRANCE, "Rome"), byte_level(), context="Old. ", targets=[(7, 7)]).target == (7, 7)


def test_a_prompt_must_fit_with_its_target():
    prompt, tokenizer = marked(FRANCE, "Rome"), byte_level()
    encoded = encode(prompt, tokenizer, (0,))
    length = len(encoded.ids) + len(encoded.target)
    assert encode(prompt, tokenizer, (0,), limit=length) == encoded
    with raises(InputError, "prompt_too_long"):
        encode(prompt, tokenizer, (0,), limit=length - 1)
    with pytest.raises(InputError):  # there must be room for an answer
        encode(Prompt("The capital of France is"), tokenizer, (0,), limit=len(encoded.ids))


def test_text_without_tokens_is_refused():
    tokenizer = wrapped(Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])))  # drops every other letter
    with raises(InputError, "subject_without_tokens"):
        encode(marked("a {x}", "b"), tokenizer)
    with raises(InputError, "target_without_tokens"):
        encode(marked("{a} b", "x"), tokenizer)


@pytest.mark.parametrize(("text", "code"), [(3, "not_text"), (" ", "empty_text"), ("\ud800", "invalid_unicode")])
def test_a_prompt_is_text(text, code):
    with raises(InputError, code):
        Prompt(text)


# Chat

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)


def chat_text(prompt, template, **options):
    """Return a prompt in a chat template as text: all of it, up to the subject, and the target."""
    tokenizer = wrapped(byte_level().backend_tokenizer)
    tokenizer.chat_template = template
    encoded = encode(prompt.in_chat(), tokenizer, (7,), **options)
    to_subject = tokenizer.decode(encoded.ids[: encoded.subject_last + 1])
    return tokenizer.decode(encoded.ids), to_subject, tokenizer.decode(encoded.target)


def test_a_sentence_begins_the_turn_of_the_assistant_and_a_question_is_that_of_the_user():
    text, to_subject, target = chat_text(marked(FRANCE + " ", "Rome"), CHATML, context="Old. ")
    assert text == (
        "<|user|>\nOld. Complete the sentence: The capital of France is</s>\n<|assistant|>\nThe capital of France is"
    )
    assert to_subject == text.removesuffix(" is")
    assert target == " Rome"
    question = marked("What is {France}'s capital?", "Rome")
    text, to_subject, target = chat_text(question, CHATML, context="Old. ")
    assert text == "<|user|>\nOld. What is France's capital?</s>\n<|assistant|>\n"
    assert to_subject == "<|user|>\nOld. What is France"
    assert target == "Rome"
    assert chat_text(Prompt(question.text), CHATML, context="Old. ")[::2] == (text, "")
    _, to_subject, _ = chat_text(marked("Is it {Rome}?", "Rome?"), CHATML)  # the subject is also the target
    assert to_subject == "<|user|>\nIs it Rome"


def test_the_template_decides_how_turns_are_spaced():
    text, to_subject, target = chat_text(marked("  What is {France}'s capital? ", "Rome"), INST)
    assert (text, target) == ("[INST] What is France's capital? [/INST]", " Rome")
    assert to_subject == "[INST] What is France"
    text, to_subject, target = chat_text(marked(" The capital of {France} is", "Rome"), INST)
    sentence = "The capital of France is"
    assert (text, target) == (f"[INST] Complete the sentence: {sentence} [/INST] {sentence}", " Rome")
    assert to_subject == text.removesuffix(" is")


SHOUTING = "{% for m in messages %}{{ m.content if m.role == 'user' else m.content | upper }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("What is {France}'s capital?", None),
        ("What is {France}'s capital?", "{% for m in messages %}{{ m.content | upper }}{% endfor %}"),
        ("What is {France}'s capital?", "{{ messages[1].content }}"),
        (FRANCE, SHOUTING),  # the user's turn repeats the sentence unchanged: not to be taken for the assistant's
    ],
)
def test_templates_that_fail_or_change_the_text_are_refused(text, template):
    with raises(InputError, "unusable_chat_template"):
        chat_text(marked(text, "Rome"), template)
