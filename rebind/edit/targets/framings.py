"""Framings: the ways in which a fact will be asked, and is therefore searched for and keyed.

| framing | the fact is asked |
| --- | --- |
| `start` | by its bare prompt behind the start tokens, as rebind asks it |
| `plain` | by its bare prompt without them, as plain `transformers` does where the tokenizer adds none |
| `text` | in the middle of a text: behind contexts sampled from the model |
| `paraphrase` | in other words: the user's, or made by patterns |
| `chat` | by a question in the chat template, which the assistant answers with the prompt |

A framing that does not apply to a model or a fact is left out: a tokenizer may add the start tokens itself, or have no
chat template. Where a subject would be the very first token, its hidden state is the attention sink of the whole text,
and that prompt is left out, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.questions import paraphrases_of, questions_of
from rebind.errors import FactWarning, InputError
from rebind.memory.checks import require_number, unknown_name
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt

FRAMINGS = ("start", "plain", "text", "paraphrase", "chat")
QUESTION_FORMS = ("Question: {}\nAnswer:", "{} The answer is")  # questions outside of a chat
TOP_K = 5
MOST_TOKENS = 1_000  # of a context
FIRST_WORDS = ("The", "Because", "I", "You", "In", "When", "They", "It", "We", "A")


@dataclass(frozen=True)
class ContextSettings:
    """How contexts are sampled, as in MEMIT's code, which has five of them."""

    first_words: tuple[str, ...] = FIRST_WORDS[:3]  # one context begins with each
    tokens: int = 10  # per context

    def __post_init__(self) -> None:
        require_number("tokens", self.tokens, least=1, most=MOST_TOKENS, whole=True)

    @classmethod
    def of(cls, count: int) -> ContextSettings:
        """Return the settings for this many contexts; they differ even where they begin with the same word."""
        return cls(tuple(islice(cycle(FIRST_WORDS), count)))


def sample_contexts(model: LanguageModel, settings: ContextSettings, seed: int) -> tuple[str, ...]:
    """Sample contexts from the model as it stands."""
    contexts = []
    for index, word in enumerate(settings.first_words):
        first = torch.tensor([model.tokenizer(word, add_special_tokens=False).input_ids]).to(model.device)
        ids = model.sample(first, max(settings.tokens, first.shape[-1]), seed=seed + index, top_k=TOP_K)
        contexts.append(str(model.tokenizer.decode(ids[0], skip_special_tokens=True)).strip() + ". ")
    return tuple(contexts)


def applicable_framings(model: LanguageModel, framings: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the framings that apply to a model: of those asked for, or of all."""
    if framings is not None:
        require_framings(framings)
    missing = set()
    if not model.start or model.adds_start:
        missing.add("plain")
    if not model.tokenizer.chat_template:
        missing.add("chat")
    if framings is not None and (unusable := missing & set(framings)):
        raise InputError(
            f"Framing {min(unusable)!r} does not apply to {model.name}",
            expected=f"some of {', '.join(name for name in FRAMINGS if name not in missing)}",
            code="framing_not_applicable",
        )
    return tuple(name for name in (FRAMINGS if framings is None else framings) if name not in missing)


def require_framings(names: Sequence[str]) -> None:
    """Raise if there are no names, or one of them is no framing."""
    if isinstance(names, str) or not names:
        expected = f"a list with some of {', '.join(FRAMINGS)}"
        raise InputError(f"The framings are {names!r}", expected=expected, code="no_framings")
    for name in names:
        if name not in FRAMINGS:
            raise unknown_name("framing", name, FRAMINGS)


def framed_prompts(fact: Fact, framing: str, leads: Mapping[str, str] | None = None) -> list[Prompt]:
    """Return the prompts of a fact in a framing, with the subject marked in each.

    In a chat the assistant answers with the prompt of the fact, or with the words in `leads` for a question.
    """
    if framing == "paraphrase":
        written = [*paraphrases_of(fact)]
        for question, form in zip(questions_of(fact), cycle(QUESTION_FORMS)):
            written.append(form.format(question))
        return [prompt for text in written if (prompt := mark_subject(text, fact))]
    if framing == "chat":
        questions = questions_of(fact) or (f"Tell me about {fact.subject}.",)
        leads = leads or {}
        begin, end = fact.as_prompt().subject or (0, 0)
        # A prompt that asks and answers, "Where is {X}? It is in", begins the assistant's turn with the answer.
        cut = fact.text.rfind("? ") + 2 if "? " in fact.text else 0
        answer = fact.text[cut:]
        prompts = []
        for question in questions:
            inside = mark_subject(question, fact)
            if inside and question in leads:
                prompts.append(Prompt(leads[question], fact.target, inside.subject, question))
                continue
            span = (len(question) + begin - cut, len(question) + end - cut) if begin >= cut else None
            if inside and span is None:
                span = inside.subject
            if span is not None:
                prompts.append(Prompt(answer, fact.target, span, question))
        return prompts
    return [fact.as_prompt()]


def mark_subject(text: str, fact: Fact) -> Prompt | None:
    """Return a text as a prompt for the target, with the last mention of the subject marked; None if there is none.

    Inside a sentence, a subject from the beginning of the prompt may have a lowercase first letter: "bees" for "Bees".
    """
    begin = text.rfind(fact.subject)
    if begin < 0:
        begin = text.rfind(fact.subject[0].lower() + fact.subject[1:])
    return Prompt(text, fact.target, (begin, begin + len(fact.subject))) if begin >= 0 else None


def encode_framings(
    model: LanguageModel,
    facts: Sequence[Fact],
    framings: Sequence[str],
    contexts: Sequence[str],
    leads: Sequence[Mapping[str, str]] | None = None,  # of each fact, as in `framed_prompts`
) -> list[list[tuple[str, EncodedPrompt]]]:
    """Encode every fact in every framing, which stands beside each prompt; the first prompt is the bare one."""
    encoded: list[list[tuple[str, EncodedPrompt]]] = [[] for _ in facts]
    bare = [fact.as_prompt() for fact in facts]
    with_start = model.encode(bare)
    targets = [prompt.target for prompt in with_start]
    for framing in ("start", *(name for name in framings if name != "start")):
        if framing == "start":
            rows = list(enumerate(with_start))
        elif framing == "plain":
            rows = list(enumerate(model.encode(bare, start=False, targets=targets)))
        elif framing == "text":
            rows = [
                row for context in contexts for row in enumerate(model.encode(bare, context=context, targets=targets))
            ]
        else:
            known_leads = leads or [{}] * len(facts)
            owners = [
                (index, prompt)
                for index, (fact, own) in enumerate(zip(facts, known_leads, strict=True))
                for prompt in framed_prompts(fact, framing, own)
            ]
            prompts = model.encode([prompt for _, prompt in owners])
            rows = [(index, prompt) for (index, _), prompt in zip(owners, prompts, strict=True)]
        for index, prompt in rows:
            usable = without_sink(prompt)
            if usable is not None or framing == "start":
                encoded[index].append((framing, usable or prompt))
    return encoded


def warn_of_sinks(model: LanguageModel, facts: Sequence[Fact], framings: Sequence[str]) -> None:
    """Warn of facts that cannot be written in the plain framing, because they begin with a subject of one token."""
    if "plain" not in framings:
        return
    beginning = [fact for fact in facts if not fact.parts[0].strip()]
    plain = model.encode([fact.as_prompt() for fact in beginning], start=False)
    first = [fact for fact, prompt in zip(beginning, plain, strict=True) if without_sink(prompt) is None]
    if first:
        others = f" and {len(first) - 1} more prompts" if len(first) > 1 else ""
        warnings.warn(
            f"Without start tokens, the subject is the very first token of {first[0].text!r}{others}. The model "
            f"attends to that token from everywhere, so it is left as it is, and the fact may not be said that way. "
            f"Rephrase the prompt so that other words come first.",
            FactWarning,
            stacklevel=3,
        )


def warn_of_unused_paraphrases(facts: Sequence[Fact], framings: Sequence[str]) -> None:
    """Warn of paraphrases that facts cannot be written in, because they do not name the subject."""
    if "paraphrase" not in framings:
        return
    unused = [(fact, text) for fact in facts for text in fact.paraphrases if mark_subject(text, fact) is None]
    if unused:
        fact, text = unused[0]
        others = f" Neither are {len(unused) - 1} more, for the same reason." if len(unused) > 1 else ""
        warnings.warn(
            f"The paraphrase {text!r} is not used, because it does not name the subject {fact.subject!r}.{others} "
            f"Name the subject exactly as in the fact.",
            FactWarning,
            stacklevel=3,
        )


def without_sink(prompt: EncodedPrompt) -> EncodedPrompt | None:
    """Return a prompt without a mention at the very first token; None if there is no other mention."""
    mentions = tuple(mention for mention in prompt.mentions if mention > 0)
    if not mentions:
        return None
    return replace(prompt, mentions=mentions, subject_last=max(prompt.subject_last, mentions[0]))
