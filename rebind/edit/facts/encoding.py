"""Encoding facts: the tokens they are made of.

Editing needs two things of a fact's tokens: which one is the subject's last (there the key is read and
the value written), and which ones are the target's. Both are found in the text as the model will
see it, by the tokenizer's offset mapping. Counting the tokens of the subject alone, as is often
done, is wrong as soon as the subject is tokenised differently in its sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError


@dataclass(frozen=True)
class Encoded:
    """A fact as the model reads it."""

    ids: tuple[int, ...]  # what begins a sequence, then the prompt
    subject_last: int  # index in `ids` of the subject's last token
    target: tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    """A fact as text, before it is tokens."""

    prompt: str
    subject: tuple[int, int]  # where the subject begins and ends in it
    target: str  # with whatever stands between it and the prompt


def encode(
    fact: Fact,
    tokenizer: Any,  # a fast tokenizer of transformers
    start: tuple[int, ...],
    *,
    chat: bool = False,
    context: str = "",
    limit: int | None = None,
) -> Encoded:
    """The tokens of one fact; `encode_many` has the details."""
    return encode_many([fact], tokenizer, start, chat=chat, context=context, limit=limit)[0]


def encode_many(
    facts: Sequence[Fact],
    tokenizer: Any,
    start: tuple[int, ...],
    *,
    chat: bool = False,
    context: str = "",
    limit: int | None = None,
    targets: Sequence[tuple[int, ...]] | None = None,
) -> list[Encoded]:
    """The tokens of each fact behind `context`, in two calls of the tokenizer however many there are.

    `start` is what begins every sequence of this model. The target follows the prompt after a space, unless
    the prompt ends in white space or an opening bracket or quote, or both are in a script written without
    spaces; a space that ends the prompt is taken into the target, where tokenizers want it. `limit` is the
    longest sequence the model takes. `targets` are the targets' tokens where they are known already: what the
    prompts end with decides them, not the context.

    With `chat` the fact is put in the tokenizer's chat template. A question ("What is the capital of
    {France}?") is asked by the user, and the target is how the assistant begins to answer. Anything else is
    the beginning of the assistant's own turn, the user having said "Complete the sentence: …": the model
    reads its subject there, as it does when it answers in full sentences. No system message is given, so the
    template's default stands, as in most conversations; the template also says how a sequence begins, and
    `start` is not used.
    """
    if not facts:
        return []
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{type(tokenizer).__name__} has no offset mapping, expected a fast tokenizer: "
            f"load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    layouts = [_lay_out_chat(fact, context, tokenizer) if chat else _lay_out(fact, context) for fact in facts]
    prompts, offsets = _tokenise([layout.prompt for layout in layouts], tokenizer)
    targets = targets if targets is not None else _targets(facts, layouts, prompts, tokenizer)
    opening = () if chat else tuple(start)
    encoded = []
    for fact, layout, prompt, spans, target in zip(facts, layouts, prompts, offsets, targets, strict=True):
        last = _last_overlap(spans, layout.subject)
        if last is None:
            raise InputError(f"no token of {fact.text!r} stands for subject {fact.subject!r}: use another subject")
        ids = (*opening, *prompt)
        if limit is not None and len(ids) + len(target) > limit:
            raise InputError(
                f"fact {_shortened(fact.text)!r} → {_shortened(fact.target)!r} is {len(ids) + len(target)} tokens "
                f"with its context, the model takes {limit}: shorten the prompt or the target"
            )
        encoded.append(Encoded(ids, len(opening) + last, target))
    return encoded


def _targets(
    facts: Sequence[Fact], layouts: Sequence[_Layout], prompts: Sequence[list[int]], tokenizer: Any
) -> list[tuple[int, ...]]:
    """Each target's tokens, as they follow the prompt's."""
    joint, _ = _tokenise([layout.prompt + layout.target for layout in layouts], tokenizer)
    found = []
    for fact, layout, prompt, both in zip(facts, layouts, prompts, joint, strict=True):
        target = both[len(prompt) :] if both[: len(prompt)] == prompt else _tokenise_alone(layout.target, tokenizer)
        if not target:
            raise InputError(f"no token stands for target {fact.target!r} of {fact.text!r}: use another target")
        found.append(tuple(target))
    return found


def _lay_out(fact: Fact, context: str) -> _Layout:
    before, after = fact.parts
    begin = len(context) + len(before)
    text = context + before + fact.subject + after
    prompt = text.rstrip(" ")
    moved = text[len(prompt) :]
    space = moved or (" " if _takes_space(prompt, fact.target) else "")
    return _Layout(prompt, (begin, begin + len(fact.subject)), space + fact.target)


def _lay_out_chat(fact: Fact, context: str, tokenizer: Any) -> _Layout:
    plain = _lay_out(fact, context)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{type(tokenizer).__name__} of {getattr(tokenizer, 'name_or_path', '') or 'this model'} has no chat "
            f"template, expected one to chat with: leave chat out, or take an instruction-tuned model"
        )
    asked = plain.prompt.strip()
    if asked[-1] in "?？؟":
        end, whole = fact.target, _converse(plain.prompt, fact.target, tokenizer)
        text = whole.removesuffix(fact.target)
        prompt = text.rstrip(" ")
        target = text[len(prompt) :] + fact.target
    else:
        end, whole = asked, _converse(f"Complete the sentence: {fact.text.strip()}", plain.prompt, tokenizer)
        prompt, target = whole, plain.target
    place = prompt.rfind(asked)
    if place < 0 or not whole.endswith(end):
        raise InputError(f"the chat template changes the text {asked!r}, expected it to stand: leave chat out")
    # The template may have stripped spaces in front of the text.
    shift = place - (len(plain.prompt) - len(plain.prompt.lstrip()))
    return _Layout(prompt, (plain.subject[0] + shift, plain.subject[1] + shift), target)


def _converse(user: str, assistant: str, tokenizer: Any) -> str:
    """A conversation as text, up to where the assistant's words so far end."""
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True))
    except Exception as problem:  # a template is its author's program: it may raise anything
        raise InputError(f"the chat template fails ({problem}): leave chat out, or repair the template") from problem


def _tokenise(texts: list[str], tokenizer: Any) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Ids and the characters they stand for, nothing added, cut or padded."""
    batch = tokenizer(
        texts,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        padding=False,
        truncation=False,
        verbose=False,
    )
    return batch["input_ids"], batch["offset_mapping"]


def _tokenise_alone(text: str, tokenizer: Any) -> list[int]:
    """A piece of text from the middle of a line.

    Tokenizers in the manner of SentencePiece put a space in front of whatever they are given. Behind an anchor
    there is none, so the piece is read there, provided the anchor keeps to itself.
    """
    for anchor in ("\n", "."):
        (alone, both), _ = _tokenise([anchor, anchor + text], tokenizer)
        if alone and both[: len(alone)] == alone and len(both) > len(alone):
            return both[len(alone) :]
    return _tokenise([text], tokenizer)[0][0]


def _last_overlap(spans: Sequence[tuple[int, int]], subject: tuple[int, int]) -> int | None:
    """The last token with a character of the subject; one that stands for no character has none."""
    begin, end = subject
    for index in range(len(spans) - 1, -1, -1):
        left, right = spans[index]
        if max(left, begin) < min(right, end):
            return index
    return None


# Han, kana, Thai, Lao, Tibetan, Burmese, Khmer, and the full-width punctuation written with them.
SPACELESS = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31a0-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff"
    "\uff00-\uffef\U00020000-\U0003ffff]"
)


def _takes_space(prompt: str, target: str) -> bool:
    """Whether a writer would put a space between the two."""
    last = prompt[-1]
    if last.isspace() or unicodedata.category(last) in ("Ps", "Pi"):  # opening brackets and quotes
        return False
    if last in "\"'" and (len(prompt) == 1 or prompt[-2].isspace()):
        return False
    return not (SPACELESS.match(last) and SPACELESS.match(target))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
