"""Prompts as text and as tokens, and tokens as text.

Editing needs two things from the tokens of a prompt: which one is the last of the subject (there the key is read and
the value written), and which ones are the target. Both are found in the text as the model sees it, through the offset
mapping of the tokenizer. Counting the tokens of the subject alone is wrong as soon as the subject is tokenized
differently inside its sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rebind.errors import InputError

# Han, kana, Thai, Lao, Tibetan, Burmese, Khmer, and the full-width punctuation written with them.
SPACELESS_SCRIPTS = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31a0-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff"
    "\uff00-\uffef\U00020000-\U0003ffff]"
)
QUESTION_MARKS = "?？؟"
ONLY_IDS = {
    "add_special_tokens": False,
    "padding": False,
    "truncation": False,
    "return_attention_mask": False,
    "verbose": False,
}
PLACEHOLDER = "."  # stands for the answer in a chat template where a prompt has no target


def require_text(name: str, value: object) -> None:
    """Raise unless `value` is a string that is not blank and is valid Unicode."""
    label = name[:1].upper() + name[1:]
    if not isinstance(value, str):
        try:
            description = f"{value!r:.60} "
        except RecursionError:  # deeply nested lists
            description = ""
        raise InputError(f"{label} is {description}({type(value).__name__})", expected="a string", code="not_text")
    if not value.strip():
        raise InputError(f"{label} is {value!r}", expected="text that is not empty", code="empty_text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{label} {value!r} is not valid Unicode", code="invalid_unicode") from None


@dataclass(frozen=True)
class Prompt:
    """The text before an answer, the answer the model should give, and where the subject is.

    With a `question` the prompt is a conversation in the chat template: the user asks, and `text`, which may be empty
    then, begins the answer of the assistant.
    """

    text: str
    target: str = ""  # without a space in front, which encoding adds; empty if only the prompt matters
    subject: tuple[int, int] | None = None  # where the subject begins and ends in `question + text`
    question: str = ""

    def __post_init__(self) -> None:
        require_text("prompt", self.question or self.text)
        object.__setattr__(self, "target", self.target.strip())

    def in_chat(self) -> Prompt:
        """Return this prompt as a conversation.

        A question is asked by the user, and the target begins the answer of the assistant. Anything else begins the
        turn of the assistant, after the user said "Complete the sentence: ...". The model then reads the subject in its
        own turn, as it does when it answers in full sentences.
        """
        if self.question:
            return self
        if self.text.strip()[-1] in QUESTION_MARKS:
            return Prompt("", self.target, self.subject, self.text)
        question = f"Complete the sentence: {self.text.strip()}"
        begin, end = self.subject or (0, len(self.text))
        return Prompt(self.text, self.target, (len(question) + begin, len(question) + end), question)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it."""

    ids: tuple[int, ...]  # the start tokens, then the prompt
    subject_last: int  # index in `ids` of the last token of the subject; of the prompt where no subject is marked
    target: tuple[int, ...]
    mentions: tuple[int, ...] = ()  # the last token of every mention of the subject, including the marked one
    answer: int | None = None  # in a chat, the first token of the assistant's answer, if the prompt begins it

    def __post_init__(self) -> None:
        object.__setattr__(self, "mentions", self.mentions or (self.subject_last,))


@dataclass(frozen=True)
class _Layout:
    """The text of a prompt in its context or chat template, before it is tokenized."""

    prompt: str
    subject: tuple[int, int]  # where the subject begins and ends in `prompt`
    target: str  # with the space between it and the prompt
    begin: int = 0  # where the words of the prompt begin, behind what a chat template puts in front
    answer: int | None = None  # where the assistant's answer begins

    @property
    def mentions(self) -> list[int]:
        """Where each mention of the subject as a separate word ends, including the marked one."""
        name = self.prompt[slice(*self.subject)].strip()
        return sorted({*_word_ends(self.prompt, name, self.begin), self.subject[1]})


def _word_ends(text: str, name: str, begin: int) -> Iterator[int]:
    """Yield where a name ends as a separate word. (Compiling a regular expression per name would take far longer.)"""
    while name and (at := text.find(name, begin)) >= 0:
        end = at + len(name)
        around = text[at - 1 : at] + text[end : end + 1]
        is_word = not any(letter.isalnum() or letter == "_" for letter in around)
        begin = end if is_word else at + 1
        if is_word:
            yield end


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,  # a fast tokenizer of transformers
    start: tuple[int, ...] = (),
    *,
    context: str = "",
    limit: int | None = None,
    targets: Sequence[tuple[int, ...]] | None = None,
) -> list[EncodedPrompt]:
    """Return the tokens of each prompt behind `context`, in two calls of the tokenizer for any number of prompts.

    The target follows the prompt after a space, unless the prompt ends in white space or an opening bracket or quote,
    or both are in a script written without spaces. A space that ends the prompt moves to the front of the target,
    where tokenizers expect it.

    A prompt with a question goes into the chat template of the tokenizer. There is no system message, so the default
    of the template applies. The template decides how a sequence begins, and the start tokens are not used.

    `limit` is the context length of the model. `targets` are the tokens of the targets where they are known already;
    they do not depend on `context`.
    """
    if not prompts:
        return []
    layouts = [
        _lay_out_chat(prompt, context, tokenizer) if prompt.question else _lay_out(prompt, context)
        for prompt in prompts
    ]
    prompt_ids, offsets = _tokenize_with_offsets([layout.prompt for layout in layouts], tokenizer)
    if targets is None:
        targets = _target_tokens(prompts, layouts, prompt_ids, tokenizer)
    encoded = []
    for prompt, layout, ids, spans, target in zip(prompts, layouts, prompt_ids, offsets, targets, strict=True):
        opening = () if prompt.question else tuple(start)
        length = len(opening) + len(ids) + max(1, len(target))
        if limit is not None and length > limit:
            raise InputError(
                f"Prompt {prompt.text[:60]!r} with its answer is {length} tokens long",
                expected=f"at most {limit} tokens, the context length of the model",
                code="prompt_too_long",
            )
        encoded.append(_encode(prompt, layout, opening, ids, spans, target))
    return encoded


def _encode(
    prompt: Prompt,
    layout: _Layout,
    opening: tuple[int, ...],
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],  # the characters of the layout that each token stands for
    target: tuple[int, ...],
) -> EncodedPrompt:
    """Return a tokenized prompt behind the tokens of `opening`, with the tokens that end its mentions."""
    begin, end = layout.subject
    subject = [index for index, (left, right) in enumerate(spans) if max(left, begin) < min(right, end)]
    if not subject:
        raise InputError(f"The subject of {prompt.text!r} has no tokens", code="subject_without_tokens")
    last = len(opening) + subject[-1]
    mentions = {
        len(opening) + index
        for mention_end in layout.mentions
        for index, (left, right) in enumerate(spans)
        if left < mention_end <= right  # the token covers the last character of the mention
    }
    answer = None
    if layout.answer is not None:
        answer = next(index for index, (_, right) in enumerate(spans) if right > layout.answer)
    return EncodedPrompt((*opening, *ids), last, target, tuple(sorted({*mentions, last})), answer)


def _target_tokens(
    prompts: Sequence[Prompt], layouts: Sequence[_Layout], prompt_ids: Sequence[list[int]], tokenizer: Any
) -> list[tuple[int, ...]]:
    """Return the tokens of each target, as they follow those of the prompt."""
    if not any(prompt.target for prompt in prompts):
        return [() for _ in prompts]
    joint = _tokenize([layout.prompt + layout.target for layout in layouts], tokenizer)
    targets = []
    for prompt, layout, ids, both in zip(prompts, layouts, prompt_ids, joint, strict=True):
        follows = both[: len(ids)] == ids
        target = both[len(ids) :] if follows else _tokenize_alone(layout.target, tokenizer)
        if prompt.target and not target:
            raise InputError(f"Target {prompt.target!r} of {prompt.text!r} has no tokens", code="target_without_tokens")
        targets.append(tuple(target) if prompt.target else ())
    return targets


def _lay_out(prompt: Prompt, context: str) -> _Layout:
    begin, end = prompt.subject or (0, len(prompt.text))
    whole = context + prompt.text
    text = whole.rstrip(" ")
    space = whole[len(text) :] or (" " if _takes_space(text, prompt.target) else "")
    return _Layout(text, (len(context) + begin, len(context) + end), space + prompt.target)


def _lay_out_chat(prompt: Prompt, context: str, tokenizer: Any) -> _Layout:
    question, answer = context + prompt.question, prompt.text.rstrip(" ")
    last_words = answer or prompt.target or PLACEHOLDER
    whole = _render_chat(question, last_words, tokenizer)
    if answer:
        space = prompt.text[len(answer) :] or (" " if _takes_space(answer, prompt.target) else "")
        text, target = whole, space + prompt.target
    else:
        before = whole.removesuffix(last_words)
        text = before.rstrip(" ")
        target = before[len(text) :] + prompt.target
    question_begin, answer_begin = whole.find(question.strip()), whole.rfind(answer.strip())
    if question_begin < 0 or not whole.endswith(last_words.strip()):
        raise _chat_error(f"The chat template changes the text {question.strip()!r}")
    # The template may have stripped spaces in front of both.
    in_question = question_begin + len(context) - (len(question) - len(question.lstrip()))
    in_answer = answer_begin - len(prompt.question) - (len(answer) - len(answer.lstrip()))
    length = len(prompt.question)
    begin, end = prompt.subject or ((length, length + len(answer)) if answer else (0, length))
    shift = in_question if begin < length else in_answer
    return _Layout(text, (begin + shift, end + shift), target, question_begin, answer_begin if answer else None)


def _render_chat(user: str, assistant: str, tokenizer: Any) -> str:
    """Return a conversation as text that ends with what the assistant has said so far."""
    if not tokenizer.chat_template:
        raise _chat_error("The model has no chat template")
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True))
    except Exception as problem:  # of the template, which is a program
        raise _chat_error(f"The chat template fails ({problem})") from problem


def _chat_error(problem: str) -> InputError:
    return InputError(
        problem,
        advice="Leave out {chat}, or use an instruction-tuned model",
        settings={"chat": True},
        code="unusable_chat_template",
    )


def _tokenize_with_offsets(texts: list[str], tokenizer: Any) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Return the token ids of each text and the span of characters of each token, without special tokens."""
    batch = tokenizer(texts, return_offsets_mapping=True, **ONLY_IDS)
    return batch["input_ids"], batch["offset_mapping"]


def _tokenize(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    ids: list[list[int]] = tokenizer(texts, **ONLY_IDS)["input_ids"]
    return ids


def _tokenize_alone(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of text from the middle of a line.

    SentencePiece tokenizers put a space in front of every text. They put none behind an anchor, so the text is
    tokenized there, provided the anchor does not merge with it.
    """
    for anchor in ("\n", "."):
        alone, both = _tokenize([anchor, anchor + text], tokenizer)
        if alone and both[: len(alone)] == alone and len(both) > len(alone):
            return both[len(alone) :]
    return _tokenize([text], tokenizer)[0]


def _takes_space(prompt: str, target: str) -> bool:
    """Return whether a writer would put a space between the two."""
    last = prompt[-1]
    if last.isspace() or unicodedata.category(last) in ("Ps", "Pi"):  # opening brackets and quotes
        return False
    if last in "\"'" and (len(prompt) == 1 or prompt[-2].isspace()):
        return False
    return not (SPACELESS_SCRIPTS.match(last) and SPACELESS_SCRIPTS.match(target))


def ends_with_word(text: str) -> bool:
    """Return whether a text ends with a letter or digit of a script in which spaces separate words."""
    return text[-1:].isalnum() and not SPACELESS_SCRIPTS.match(text[-1])


def decode_continuation(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of tokens that follow `before`; decoded alone, SentencePiece would drop their first space."""
    last = before[-1:]
    first, whole = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (last, [*last, *new]))
    return whole[len(first) :] if whole.startswith(first) else str(tokenizer.decode(new, skip_special_tokens=True))


def start_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that belong before every prompt.

    These are the tokens that the tokenizer itself puts in front (and not those that it appends). GPT-2, Pythia and
    SmolLM2 add nothing, yet saw every training document after `<|endoftext|>`, and recall facts better with it: on 64
    simple facts SmolLM2 ranks the answer first for 77% with it, 66% without, 58% with its own bos token.
    """
    text = "a"
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    full = tokenizer(text, add_special_tokens=True)["input_ids"]
    for count in range(1, len(full) - len(bare) + 1):
        if full[count : count + len(bare)] == bare:
            return tuple(full[:count])
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    # An unknown token gets the id of unk, which in the GPT-2 family is <|endoftext|> itself: convert it back.
    if isinstance(end_of_text, int) and tokenizer.convert_ids_to_tokens(end_of_text) == "<|endoftext|>":
        return (end_of_text,)
    return ()
