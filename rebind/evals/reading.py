"""Read records from a file, a dataset of the Hub, or Python objects.

    records = read_records("counterfact.json", limit=1000, skip_bad=True)
    records = read_records("hf:azhx/counterfact:test")
    records = bundled_records()  # sixty facts that come with the package

Formats are recognized by their fields: CounterFact, zsRE, Knowns, MQuAKE, EasyEdit, KnowEdit, and rebind's JSONL.
`rebind.edit.facts` reads the fact of a record; this module adds the questions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rebind.edit.facts.fact import Fact, require_field
from rebind.edit.facts.readers import parse_fact, raw_records, record_error, reject_misspelled_fields
from rebind.errors import InputError
from rebind.evals.records import Question, Record, Records
from rebind.models.prompts import require_text

BUNDLED = Path(__file__).parent / "data" / "facts.jsonl"
HUB = "hf:"
QUESTIONS = ("consequences", "reversed", "generation_prompts", "references", "also")  # fields of rebind's own records
NOUN_OF = re.compile(r"(?P<noun>the .+ (?:of|in|for)) $", re.IGNORECASE)
IS_THE = re.compile(r" (?P<be>is|was)(?P<article> the)?$")
IS_NOUN_OF = re.compile(r" (?P<be>is|was) the (?P<noun>\w+ (?:of|in|for))$")


def bundled_records(limit: int | None = None) -> Records:
    """Return the sixty facts over ten relations that come with the package."""
    return replace(read_records(BUNDLED, limit=limit), name="bundled")


def read_records(
    source: str | Path | Mapping[str, object] | Iterable[object], *, limit: int | None = None, skip_bad: bool = False
) -> Records:
    """Read the records of a file, of a Hub dataset ("hf:name" or "hf:name:split"), or of an iterable.

    A record that cannot be read raises an error that names it; with `skip_bad` it is skipped and the reason stored.
    `limit` counts the records that are returned.
    """
    if isinstance(source, str) and source.startswith(HUB):
        name, items = source, raw_records(_hub_dataset(source))
    else:
        name, items = Path(source).name if isinstance(source, (str, Path)) else "records", raw_records(source)
    numbers = count()
    records, skipped = select(items, lambda raw: parse_record(raw, str(next(numbers))), skip_bad=skip_bad, limit=limit)
    if not records:
        why = f" ({len(skipped)} skipped; the first: {skipped[0]})" if skipped else ""
        raise InputError(f"{name} has no records{why}", expected="at least one", code="no_records")
    return Records(tuple(records), name, tuple(skipped))


def select(
    items: Iterable[tuple[str, Any]], as_record: Callable[[Any], Record], *, skip_bad: bool, limit: int | None = None
) -> tuple[list[Record], list[str]]:
    """Return the first `limit` usable items as records, and the reasons why other items were skipped.

    Items are (name, content) pairs. An unusable item raises an error that names it, unless `skip_bad`.
    """
    records: list[Record] = []
    reasons: list[str] = []
    for name, item in items:
        if len(records) == limit:
            break
        try:
            records.append(as_record(item))
        except (InputError, RecursionError) as problem:
            error = record_error(problem, name, item)
            if not skip_bad:
                error.advice, error.settings = "Correct or remove the record, or use {skip_bad}", {"skip_bad": True}
                raise error from None
            reasons.append(str(error))
    return records, reasons


def _hub_dataset(name: str) -> Iterator[Any]:
    repository, _, split = name.removeprefix(HUB).partition(":")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]  # an optional dependency

        yield from datasets.load_dataset(repository, split=split or "train")
    except Exception as problem:  # not installed, missing, gated or offline: each has its own exception
        line = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise InputError(
            f"Dataset {repository!r}, split {split or 'train'!r}, could not be loaded ({line})",
            advice="Run pip install datasets, check the name and the split, connect to the network, or pass a file",
            code="package_missing" if isinstance(problem, ImportError) else "dataset_unavailable",
        ) from None


# Formats


def parse_record(raw: Any, number: str) -> Record:
    """Read a record in any supported format; `number` becomes its id if it has none."""
    record = raw if isinstance(raw, Record) else _parse(raw, number)
    return record if record.reversed else replace(record, reversed=reversed_questions(record.fact))


def _parse(raw: Any, number: str) -> Record:
    if not isinstance(raw, Mapping):
        return _rebind_format(parse_fact(raw), {}, number)
    if isinstance(raw.get("requested_rewrite"), (list, tuple)):
        return _mquake(raw, number)
    if "src" in raw:
        return _zsre(raw, number)
    if "requested_rewrite" in raw or "target_new" in raw:
        return _counterfact(raw, number)
    return _rebind_format(parse_fact({key: value for key, value in raw.items() if key != "neighbors"}), raw, number)


def _rebind_format(fact: Fact, raw: Mapping[str, Any], number: str) -> Record:
    reject_misspelled_fields(raw, QUESTIONS)
    neighbors = _list({"neighbors": fact.neighbors, **raw}, "neighbors")
    for consequence in _list(raw, "consequences"):
        require_field(consequence, "answer", "a consequence")
    return Record(
        replace(fact, neighbors=()),
        _id(raw, "id") or _dataset_id(fact) or number,
        tuple(parse_fact(other) for other in _list(raw, "also")),
        tuple(_question(neighbor, fact.old) for neighbor in neighbors),
        tuple(_question(consequence) for consequence in _list(raw, "consequences")),
        tuple(_question(question, fact.subject) for question in _list(raw, "reversed")),
        _texts(raw, "generation_prompts"),
        _texts(raw, "references"),
    )


def _counterfact(raw: Mapping[str, Any], number: str) -> Record:
    """Read CounterFact, nested or flat, with the fields that EasyEdit and KnowEdit add."""
    fact = parse_fact(raw)
    neighbors = [_question(prompt, fact.old) for prompt in _list(raw, "neighborhood_prompts")]
    if raw.get("locality_prompt"):
        answer = _first(raw.get("locality_ground_truth"))
        neighbors.append(Question(raw["locality_prompt"], fact.old if answer is None else answer))
    sentences = [f"{prompt.rstrip()} {fact.target}." for prompt in _texts(raw, "attribute_prompts")]
    return Record(
        replace(fact, neighbors=()),
        _dataset_id(fact) or _id(raw, "id") or number,
        neighbors=(*neighbors, *_grouped_questions("locality", raw.get("locality"))),
        consequences=_portability(raw.get("portability")),
        generation_prompts=_texts(raw, "generation_prompts"),
        references=_texts(raw, "references") or tuple(sentences),
    )


def _zsre(raw: Mapping[str, Any], number: str) -> Record:
    """Read zsRE, whose locality prompts are Natural Questions without the question mark."""
    neighbors = []
    if raw.get("loc"):
        require_text("loc", raw["loc"])
        prompt = raw["loc"] if raw["loc"].rstrip().endswith("?") else f"{raw['loc']}?"
        neighbors.append(Question(prompt, _first(raw.get("loc_ans"))))
    return Record(
        replace(parse_fact(raw), neighbors=()),
        _id(raw, "case_id", "id") or f"zsre/{number}",
        neighbors=tuple(neighbors),
        consequences=_portability(raw.get("portability")),
    )


def _mquake(raw: Mapping[str, Any], number: str) -> Record:
    """Read a MQuAKE case, which changes one fact or several and asks questions that depend on all of them."""
    name = f"mquake/{_id(raw, 'case_id') or number}"
    facts = []
    for rewrite in raw["requested_rewrite"]:
        fact = parse_fact({"requested_rewrite": rewrite})
        question = rewrite.get("question")  # used as a paraphrase and as the question in a chat
        facts.append(replace(fact, paraphrases=(question,), questions=(question,)) if question else fact)
    if not facts:
        raise InputError("The field requested_rewrite is empty", expected="the facts to write", code="field_empty")
    answer, aliases = require_field(raw, "new_answer", "a MQuAKE record"), tuple(_list(raw, "new_answer_alias"))
    require_text("new_answer", answer)
    require_field(raw, "questions", "a MQuAKE record")
    consequences = tuple(Question(prompt, answer, aliases) for prompt in _list(raw, "questions"))
    return Record(replace(facts[0], tags=(name,)), name, also=tuple(facts[1:]), consequences=consequences)


def reversed_questions(fact: Fact) -> tuple[Question, ...]:
    """Return the question from the target back to the subject, if the prompt has a form that can be reversed.

    >>> reversed_questions(Fact.parse("The official currency of {Germany} is the", "peso"))[0].prompt
    'The peso is the official currency of'
    >>> reversed_questions(Fact.parse("{Madrid} is the capital of", "France"))[0].prompt
    'The capital of France is'
    """
    before, after = fact.parts
    if (forward := NOUN_OF.match(before)) and (is_the := IS_THE.match(after)):
        article = "The " if is_the["article"] else ""
        return (Question(f"{article}{fact.target} {is_the['be']} {forward['noun'].lower()}", fact.subject),)
    if not before.strip() and (backward := IS_NOUN_OF.match(after)):
        return (Question(f"The {backward['noun']} {fact.target} {backward['be']}", fact.subject),)
    return ()


def _portability(value: Any) -> tuple[Question, ...]:
    """Read the one question of EasyEdit, or the grouped questions of KnowEdit."""
    if isinstance(value, Mapping) and "New Question" in value:
        return (Question(value["New Question"], _first(require_field(value, "New Answer", "a portability record"))),)
    return _grouped_questions("portability", value)


def _grouped_questions(name: str, value: Any) -> tuple[Question, ...]:
    """Read questions in named groups, each {prompt, ground_truth}; an answer may be a list of wordings."""
    groups = value if isinstance(value, Mapping) else {name: value}
    questions = []
    for group in groups:
        for row in _list(groups, group):
            answers = _flatten(require_field(row, "ground_truth", "a question")) or [""]
            questions.append(Question(require_field(row, "prompt", "a question"), answers[0], tuple(answers[1:])))
    return tuple(questions)


def _question(value: Any, answer: str | None = None) -> Question:
    """Read a bare prompt with the default `answer`, or an object with prompt, answer and aliases."""
    if isinstance(value, Mapping):
        prompt, answer = require_field(value, "prompt", "a question"), value.get("answer", answer)
        return Question(prompt, answer, tuple(_list(value, "aliases")))
    return Question(value, answer)


def _texts(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    for text in _list(raw, name):
        require_text(f"an entry of {name}", text)
    return tuple(_list(raw, name))


def _list(raw: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = raw.get(name) or ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise InputError(f"The field {name} is {value!r}", expected="a list", code="field_not_a_list")
    return value


def _flatten(value: Any) -> list[Any]:
    return [part for item in value for part in _flatten(item)] if isinstance(value, (list, tuple)) else [value]


def _first(value: Any) -> Any:
    return next(iter(_flatten(value)), None)


def _id(raw: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of these fields that is not empty, as text."""
    text = next((str(raw[name]) for name in names if raw.get(name) not in (None, "")), None)
    if text is not None:
        require_text("id", text)
    return text


def _dataset_id(fact: Fact) -> str | None:
    """Return the tag that identifies a record of a dataset, such as counterfact/17."""
    return next((tag for tag in fact.tags if "/" in tag), None)
