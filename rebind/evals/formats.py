"""The record formats of the literature: CounterFact, zsRE, MQuAKE, EasyEdit, KnowEdit, and our own JSONL.

Formats are recognized by their fields. `rebind.edit.facts` reads the fact of a record; this module reads the questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rebind.edit.facts.fact import Fact, require_field
from rebind.edit.facts.readers import parse_fact
from rebind.errors import InputError
from rebind.evals.records import Question, Record
from rebind.models.prompts import require_text


def parse_record(raw: Any, number: str) -> Record:
    """Read a record in any supported format; `number` becomes its id if it has none."""
    if isinstance(raw, Record):
        return raw
    if isinstance(raw, Fact):
        return _own_format(raw, {}, number)
    if not isinstance(raw, Mapping):
        return _own_format(parse_fact(raw), {}, number)
    if isinstance(raw.get("requested_rewrite"), (list, tuple)):
        return _mquake(raw, number)
    if "src" in raw:
        return _zsre(raw, number)
    if "requested_rewrite" in raw or "target_new" in raw:
        return _counterfact(raw, number)
    fact = parse_fact({name: value for name, value in raw.items() if name != "neighbors"})
    return _own_format(fact, raw, number)


def _own_format(fact: Fact, raw: Mapping[str, Any], number: str) -> Record:
    neighbors = _as_list("neighbors", raw.get("neighbors", fact.neighbors))
    for consequence in _list(raw, "consequences"):
        require_field(consequence, "answer", "a consequence")
    return Record(
        replace(fact, neighbors=()),
        _id(raw, "id") or _dataset_id(fact) or number,
        tuple(parse_fact(other) for other in _list(raw, "also")),
        tuple(_question(neighbor, fact.old) for neighbor in neighbors),
        tuple(_question(consequence) for consequence in _list(raw, "consequences")),
        tuple(_list(raw, "generation_prompts")),
        tuple(_list(raw, "references")),
    )


def _counterfact(raw: Mapping[str, Any], number: str) -> Record:
    """Read CounterFact, nested or flat, with the fields that EasyEdit and KnowEdit add."""
    fact = parse_fact(raw)
    neighbors = [_question(prompt, fact.old) for prompt in _list(raw, "neighborhood_prompts")]
    if raw.get("locality_prompt"):
        answer = _first(raw.get("locality_ground_truth"))
        neighbors.append(Question(raw["locality_prompt"], fact.old if answer is None else answer))
    neighbors += _grouped_questions("locality", raw.get("locality"))
    references = tuple(_list(raw, "references"))
    return Record(
        replace(fact, neighbors=()),
        _dataset_id(fact) or _id(raw, "id") or number,
        neighbors=tuple(neighbors),
        consequences=tuple(_portability(raw.get("portability"))),
        generation_prompts=tuple(_list(raw, "generation_prompts")),
        references=references or _attribute_sentences(_list(raw, "attribute_prompts"), fact.target),
    )


def _zsre(raw: Mapping[str, Any], number: str) -> Record:
    """Read zsRE, whose locality prompts are Natural Questions without the question mark."""
    fact = parse_fact(raw)
    neighbors = []
    if raw.get("loc"):
        require_text("loc", raw["loc"])
        prompt = raw["loc"] if raw["loc"].rstrip().endswith("?") else f"{raw['loc']}?"
        neighbors.append(Question(prompt, _first(raw.get("loc_ans"))))
    return Record(
        replace(fact, neighbors=()),
        _id(raw, "case_id", "id") or f"zsre/{number}",
        neighbors=tuple(neighbors),
        consequences=tuple(_portability(raw.get("portability"))),
    )


def _mquake(raw: Mapping[str, Any], number: str) -> Record:
    """Read a MQuAKE case, which changes one fact or several and asks questions that depend on all of them."""
    kind = "a MQuAKE record"
    rewrites = raw["requested_rewrite"]
    if not rewrites:
        raise InputError("The field requested_rewrite is empty", expected="the facts to write", code="field_empty")
    case = _id(raw, "case_id") or number
    facts = [_rewrite(rewrite) for rewrite in rewrites]
    answer, aliases = require_field(raw, "new_answer", kind), tuple(_list(raw, "new_answer_alias"))
    require_text("new_answer", answer)
    questions = _as_list("questions", require_field(raw, "questions", kind))
    return Record(
        replace(facts[0], tags=(f"mquake/{case}",)),
        f"mquake/{case}",
        also=tuple(facts[1:]),
        consequences=tuple(Question(prompt, answer, aliases) for prompt in questions),
    )


def _rewrite(rewrite: Any) -> Fact:
    """Read one fact of a case; its question becomes a paraphrase of its prompt."""
    fact = parse_fact({"requested_rewrite": rewrite})
    return replace(fact, paraphrases=(rewrite["question"],)) if rewrite.get("question") else fact


def _portability(value: Any) -> list[Question]:
    """Read the one question of EasyEdit, or the grouped questions of KnowEdit."""
    if isinstance(value, Mapping) and "New Question" in value:
        return [Question(value["New Question"], _first(require_field(value, "New Answer", "a portability record")))]
    return _grouped_questions("portability", value)


def _grouped_questions(name: str, value: Any) -> list[Question]:
    """Read questions in named groups, each {prompt, ground_truth}; an answer may be a list of wordings."""
    if isinstance(value, Mapping):
        groups = [_as_list(f"{name}[{group!r}]", questions or ()) for group, questions in value.items()]
    elif value is None or isinstance(value, (list, tuple)):
        groups = [value or ()]
    else:
        raise InputError(
            f"The field {name} is {value!r}", expected="{group: [question, ...]}", code="field_not_grouped"
        )
    found = []
    for question in (question for group in groups for question in group):
        answers = _flatten(require_field(question, "ground_truth", "a question"))
        prompt = require_field(question, "prompt", "a question")
        found.append(Question(prompt, answers[0] if answers else "", tuple(answers[1:])))
    return found


def _question(value: Any, answer: str | None = None) -> Question:
    """Read a bare prompt, whose answer is known from elsewhere, or a prompt with its answer and aliases."""
    if isinstance(value, Mapping):
        own = value.get("answer", answer)
        return Question(require_field(value, "prompt", "a question"), own, tuple(_list(value, "aliases")))
    return Question(value, answer)


def _attribute_sentences(prompts: Sequence[str], target: str) -> tuple[str, ...]:
    """Complete prompts about other subjects for which the new target is true."""
    for prompt in prompts:
        require_text("an entry of attribute_prompts", prompt)
    return tuple(f"{prompt.rstrip()} {target}." for prompt in prompts)


def _list(raw: Mapping[str, Any], name: str) -> Sequence[Any]:
    return _as_list(name, raw.get(name) or ())


def _as_list(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise InputError(f"The field {name} is {value!r}", expected="a list", code="field_not_a_list")
    return value


def _flatten(value: Any) -> list[Any]:
    return [part for item in value for part in _flatten(item)] if isinstance(value, (list, tuple)) else [value]


def _first(value: Any) -> Any:
    flat = _flatten(value)
    return flat[0] if flat else None


def _id(raw: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of these fields that is not null, as text."""
    return next((str(raw[name]) for name in names if raw.get(name) is not None), None)


def _dataset_id(fact: Fact) -> str | None:
    """Return the tag that names a dataset's record, as in counterfact/17."""
    return next((tag for tag in fact.tags if "/" in tag), None)
