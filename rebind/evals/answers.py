"""Collect the answers of a model to the questions of a record, as one row that can be stored.

Facts, paraphrases and neighbors are asked in every framing that applies to the model: behind the start tokens, without
them, behind a sentence of text, and in the chat template. Target search trains on none of these prompts: the sentence
is not one of its contexts, and a question that is derived from the prompt begins with other words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.questions import questions_from_grammar
from rebind.edit.outcome import TEXT
from rebind.edit.targets.framings import applicable_framings
from rebind.evals.records import Record
from rebind.memory.checks import require_number
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt
from rebind.models.scoring import FactScore
from rebind.storage import Row

FRAMINGS = ("start", "plain", "text", "chat")
WORST_NLL = 1e4  # stored if a broken model returns NaN
PROMPTS_PER_PASS = 64  # when next tokens are compared

BaseModel = Callable[[], AbstractContextManager[None]]  # in this context the model is unedited


@dataclass(frozen=True)
class QuestionSettings:
    """How many answers to collect for each record."""

    free_tokens: int = 24  # greedy tokens after each prompt, paraphrase and consequence; 0: none
    texts: int = 1  # longer texts per record, for fluency and consistency; 0: none
    text_tokens: int = 100
    top_k: int = 5  # longer texts are sampled from this many most likely tokens, as in ROME

    def __post_init__(self) -> None:
        for name in ("free_tokens", "texts"):
            require_number(name, getattr(self, name), whole=True)
        for name in ("text_tokens", "top_k"):
            require_number(name, getattr(self, name), least=1, whole=True)


@dataclass(frozen=True)
class _FramedPrompt:
    """A prompt in a framing. Its target is scored; without a target, the model continues it."""

    prompt: Prompt
    framing: str = "start"


def answer_records(
    model: LanguageModel,
    records: Sequence[Record],
    settings: QuestionSettings,
    *,
    base: BaseModel | None = None,
    probes: Sequence[Sequence[str]] = (),
    in_prompt: bool = False,
    seed: int = 0,
) -> list[Row]:
    """Ask the model every question of every record, and return one row per record.

    Args:
        model: the model as it is now.
        records: the records to ask about.
        settings: how much to ask.
        base: a context with the unedited model, to compare answers about neighbors with; by default they are not.
        probes: prompts about other relations of each record's subject, compared in the same way.
        in_prompt: put the facts of a record before every question about it.
        seed: the random seed for longer texts.
    """
    framings = asked_framings(model)
    questions = [_questions(record, framings, free=settings.free_tokens > 0) for record in records]
    contexts = [_sentence(record) if in_prompt else "" for record in records]
    if in_prompt:
        questions = [
            _map_prompts(row, partial(_put_before, context)) for row, context in zip(questions, contexts, strict=True)
        ]
    prompts: list[_FramedPrompt] = []
    _map_prompts(questions, prompts.append)
    answers = iter(_answer(model, prompts, settings.free_tokens))
    rows: list[Row] = _map_prompts(questions, lambda _: next(answers))
    if base is not None:
        neighbors = [[neighbor.prompt for neighbor in record.neighbors] for record in records]
        _add_comparisons(rows, "neighbors", neighbors, contexts, model, base)
        _add_comparisons(rows, "same_subject", probes or [()] * len(records), contexts, model, base)
    if settings.texts:
        _add_texts(rows, records, model, settings, seed)
    return rows


def _add_comparisons(
    rows: Sequence[Row],
    name: str,
    prompts: Sequence[Sequence[str]],  # of each record
    contexts: Sequence[str],  # of each record
    model: LanguageModel,
    base: BaseModel,
) -> None:
    """Add to each row how the next token after its prompts differs from that of the unedited model."""
    pairs = [(context + text, text) for context, texts in zip(contexts, prompts, strict=True) for text in texts]
    changes = iter(_compare(model, base, pairs))
    for row, texts in zip(rows, prompts, strict=True):
        row.setdefault("kept", {})[name] = [next(changes) for _ in texts]


def _add_texts(
    rows: Sequence[Row], records: Sequence[Record], model: LanguageModel, settings: QuestionSettings, seed: int
) -> None:
    """Add longer sampled texts to each row."""
    beginnings = [record.text_prompts[: settings.texts] for record in records]
    flat = [beginning for group in beginnings for beginning in group]
    texts = iter(model.generate(flat, settings.text_tokens, top_k=settings.top_k, seed=seed))
    for row, group in zip(rows, beginnings, strict=True):
        row["texts"] = [beginning + next(texts) for beginning in group]


def asked_framings(model: LanguageModel) -> tuple[str, ...]:
    """Return the framings that a model is asked in."""
    applicable = applicable_framings(model)
    return tuple(name for name in FRAMINGS if name in applicable)


def encode_all(model: LanguageModel, record: Record) -> None:
    """Raise unless every prompt of a record fits into the model's context, also behind its facts."""
    prompts = [_FramedPrompt(Prompt(text)) for text in record.text_prompts]
    _map_prompts(_questions(record, asked_framings(model), free=True), prompts.append)
    _encode(model, [_put_before(_sentence(record), prompt) for prompt in prompts])


def chat_question(fact: Fact) -> str:
    """Return the question for a fact in a chat: the record's own, or one derived from the prompt."""
    if fact.questions:
        return fact.questions[0]
    questions = questions_from_grammar(fact)
    if not questions:
        return f"Complete the sentence: {fact.text}"
    return f"Quick question: {questions[0][0].lower()}{questions[0][1:]}"


def _questions(record: Record, framings: Sequence[str], *, free: bool) -> Row:
    """Return the row of a record with prompts in place of their answers."""
    new, old = record.fact.target, record.fact.old

    def pair(prompt: Prompt, framing: str, targets: tuple[str, str | None]) -> Row:
        by_name = zip(("new", "true"), targets, strict=True)
        return {name: _FramedPrompt(replace(prompt, target=target), framing) for name, target in by_name if target}

    def ask_fact(fact: Fact, framing: str) -> Row:
        targets = fact.target, fact.old
        question = chat_question(fact)
        bare = Prompt(fact.text, question=question) if framing == "chat" else Prompt(fact.text)
        if framing == "chat" and fact.text.rstrip().endswith("?"):
            bare = Prompt("", question=question)
        row: Row = {
            "prompt": pair(bare, framing, targets),
            "paraphrases": [pair(_framed(text, framing), framing, targets) for text in fact.paraphrases],
        }
        if free:
            row["free"] = _FramedPrompt(Prompt("", question=question) if framing == "chat" else bare, framing)
            if framing == "start":
                row["free_paraphrases"] = [_FramedPrompt(Prompt(text)) for text in fact.paraphrases]
        return row

    choice = Prompt("", question=chat_question(record.fact)) if "chat" in framings else Prompt(record.fact.text)
    row: Row = {
        "facts": [{framing: ask_fact(fact, framing) for framing in framings} for fact in record.facts],
        "neighbors": {
            framing: [
                pair(_framed(neighbor.prompt, framing), framing, (new, neighbor.answer))
                for neighbor in record.neighbors
            ]
            for framing in framings
        },
        "choice": [_FramedPrompt(replace(choice, target=target)) for target in (new, old, *record.rivals) if target],
        "consequences": [
            [_FramedPrompt(Prompt(question.prompt, answer)) for answer in question.answers]
            for question in record.consequences
        ],
    }
    if free:
        row["free_consequences"] = [_FramedPrompt(Prompt(question.prompt)) for question in record.consequences]
        row["free_reversed"] = [_FramedPrompt(Prompt(question.prompt)) for question in record.reversed]
    return row


def _framed(text: str, framing: str) -> Prompt:
    if framing != "chat":
        return Prompt(text)
    chat = Prompt(text).in_chat()
    return Prompt(chat.text, question=chat.question)


def _sentence(record: Record) -> str:
    """Return the facts of a record as text."""
    return "".join(f"{fact.text} {fact.target}. " for fact in record.facts)


def _put_before(context: str, framed: _FramedPrompt) -> _FramedPrompt:
    prompt = framed.prompt
    if prompt.question:
        return replace(framed, prompt=replace(prompt, question=context + prompt.question))
    return replace(framed, prompt=replace(prompt, text=context + prompt.text))


def _map_prompts(value: Any, function: Callable[[_FramedPrompt], Any]) -> Any:
    """Return nested dicts and lists with the function applied to every prompt in them, in order."""
    if isinstance(value, _FramedPrompt):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_prompts(part, function) for key, part in value.items()}
    return [_map_prompts(part, function) for part in value]


def _encode(model: LanguageModel, prompts: Sequence[_FramedPrompt]) -> list[EncodedPrompt]:
    encoded: dict[int, EncodedPrompt] = {}
    for framing in FRAMINGS:
        indices = [index for index, framed in enumerate(prompts) if framed.framing == framing]
        context = TEXT if framing == "text" else ""
        bare = [prompts[index].prompt for index in indices]
        encoded |= dict(zip(indices, model.encode(bare, context=context, start=framing != "plain"), strict=True))
    return [encoded[index] for index in range(len(prompts))]


def _answer(model: LanguageModel, prompts: Sequence[_FramedPrompt], free_tokens: int) -> list[Row | str]:
    """Return the score of every target, and the continuation of every prompt without one."""
    encoded = _encode(model, prompts)
    scores = iter(model.score_encoded([prompt for prompt in encoded if prompt.target]))
    texts = iter(model.generate_encoded([prompt for prompt in encoded if not prompt.target], free_tokens))
    return [_score_json(next(scores)) if prompt.target else next(texts) for prompt in encoded]


def _score_json(score: FactScore) -> Row:
    nll = score.nll if math.isfinite(score.nll) else WORST_NLL
    return {"nll": round(nll, 6), "tokens": score.tokens, "right": score.right_tokens}


def _compare(model: LanguageModel, base: BaseModel, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Compare the next token after the first prompt of each pair with that of the unedited model after the second."""
    rows: list[Row] = []
    for begin in range(0, len(pairs), PROMPTS_PER_PASS):
        prompts, base_prompts = zip(*pairs[begin : begin + PROMPTS_PER_PASS], strict=True)
        after = model.next_token_log_probs(prompts, truncate=True)
        with base():
            before = model.next_token_log_probs(base_prompts, truncate=True)
        kl = (before.exp() * (before - after)).sum(-1).nan_to_num(WORST_NLL, WORST_NLL)
        same = before.argmax(-1) == after.argmax(-1)
        for unchanged, divergence in zip(same.tolist(), kl.clamp(0, WORST_NLL).tolist(), strict=True):
            rows.append({"same": unchanged, "kl": round(divergence, 6)})
    return rows
