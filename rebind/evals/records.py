"""Records to evaluate with: a fact to write, and everything to ask afterwards.

    records = read_records("counterfact.json", limit=1000, skip_bad=True)
    records = read_records("hf:azhx/counterfact:test")
    records = bundled()                                        # sixty facts of our own

CounterFact (nested and flat), zsRE, Knowns, MQuAKE, the portability records of EasyEdit and KnowEdit and our
own JSONL are told apart by their keys. The fact itself is read by `rebind.edit.facts.readers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from rebind.edit.facts.fact import Fact, comparable, get, require_text
from rebind.edit.facts.readers import described, fact_of, raw_records
from rebind.errors import InputError

BUNDLED = Path(__file__).parent / "data" / "facts.jsonl"
HUB = "hf:"


@dataclass(frozen=True)
class Question:
    """A prompt and what should follow it, in any of several wordings.

    Answers are stripped as a fact's targets are, so that they compare; the prompt stays as it was given.
    """

    prompt: str
    answer: str | None  # None where only a change of the answer can be seen
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_text("a question's prompt", self.prompt)
        for answer in (*self.answers[:1], *self.aliases):
            require_text(f"the answer to {self.prompt!r}", answer)
        if self.answer is not None:
            object.__setattr__(self, "answer", self.answer.strip())
        object.__setattr__(self, "aliases", tuple(alias.strip() for alias in self.aliases))

    @property
    def answers(self) -> tuple[str, ...]:
        return () if self.answer is None else (self.answer, *self.aliases)

    def to_json(self) -> dict[str, Any]:
        told = {"prompt": self.prompt, "answer": self.answer}  # without one it would be read as the fact's old target
        return told | ({"aliases": list(self.aliases)} if self.aliases else {})


@dataclass(frozen=True)
class Record:
    """A fact with its new target and its true one (`fact.target`, `fact.old`), and what to ask about it.

    Of several facts each is asked by its own prompt and paraphrases; neighbours go with the first.
    """

    fact: Fact
    id: str
    also: tuple[Fact, ...] = ()  # facts to be written with it: a MQuAKE case may change several
    neighbours: tuple[Question, ...] = ()  # other subjects, whose answers should stay
    consequences: tuple[Question, ...] = ()  # what follows from the new fact, with the answers it then has
    generation_prompts: tuple[str, ...] = ()  # beginnings of texts about the subject
    references: tuple[str, ...] = ()  # texts about things for which the new target is true

    def __post_init__(self) -> None:
        require_text("id", self.id)
        for name in ("generation_prompts", "references"):
            for text in getattr(self, name):
                require_text(f"an entry of {name}", text)

    @property
    def facts(self) -> tuple[Fact, ...]:
        return (self.fact, *self.also)

    @property
    def paraphrases(self) -> tuple[str, ...]:
        return self.fact.paraphrases

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Prompts for longer texts: those given, or else the paraphrases, or else the prompt."""
        return self.generation_prompts or self.paraphrases or (self.fact.text,)

    def to_json(self) -> dict[str, Any]:
        """One line of our own JSONL."""
        optional = {
            "also": [fact.to_json() for fact in self.also],
            "neighbours": [one.to_json() for one in self.neighbours],
            "consequences": [one.to_json() for one in self.consequences],
            "generation_prompts": list(self.generation_prompts),
            "references": list(self.references),
        }
        told = {name: value for name, value in optional.items() if value}
        return {"id": self.id, **replace(self.fact, neighbours=()).to_json(), **told}


@dataclass(frozen=True)
class Records(Sequence[Record]):
    """The records of a source, and why each of those left out was left out."""

    records: tuple[Record, ...]
    name: str = "records"
    skipped: tuple[str, ...] = ()
    places: tuple[int, ...] = ()  # how many records come before each of those left out, where that is known

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...
    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        return self.records[index]

    @property
    def digest(self) -> str:
        """A sha256 (hex) of everything that is asked."""
        whole = hashlib.sha256()
        for record in self.records:
            whole.update(json.dumps(record.to_json(), sort_keys=True).encode() + b"\n")
        return whole.hexdigest()

    def left_out(self, count: int) -> tuple[str, ...]:
        """Why those were left out that come before the last of the first `count` records."""
        if len(self.places) != len(self.skipped):
            return self.skipped
        return tuple(reason for reason, place in zip(self.skipped, self.places, strict=True) if place < count)

    def keep(self, kept: Sequence[int], reasons: Iterable[str] = ()) -> Records:
        """Those at some places, with reasons for the rest."""
        return Records(tuple(self.records[index] for index in kept), self.name, (*self.skipped, *reasons))


def bundled(limit: int | None = None) -> Records:
    """Sixty facts over ten relations, of our own writing; they come with the package."""
    return replace(read_records(BUNDLED, limit=limit), name="bundled")


def read_records(
    source: str | Path | Record | Mapping[str, Any] | Iterable[Any],
    *,
    limit: int | None = None,
    skip_bad: bool = False,
) -> Records:
    """The records of a file, of a dataset of the Hub ("hf:name" or "hf:name:split"), or of an iterable.

    A record that cannot be read is an error that names it; with `skip_bad` it is left out and the reason kept.
    `limit` counts the records kept.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}, expected 1 or more: leave it out to read everything")
    records: list[Record] = []
    skipped: list[str] = []
    places: list[int] = []
    for where, raw in _raw(source):
        if limit is not None and len(records) >= limit:
            break
        try:
            records.append(raw if isinstance(raw, Record) else _record(raw, str(len(records) + len(skipped))))
        except (InputError, RecursionError) as problem:
            message = described(problem, where, raw)
            if not skip_bad:
                raise InputError(message) from None
            skipped.append(message)
            places.append(len(records))
    if not records:
        why = f" ({len(skipped)} left out, the first: {skipped[0]})" if skipped else ""
        raise InputError(f"{_name(source)} holds no records{why}, expected at least one: check the file")
    return Records(tuple(records), _name(source), tuple(skipped), tuple(places))


def without_conflicts(records: Records, *, skip_bad: bool) -> Records:
    """Records that can be written together: of those that ask for different targets after one prompt, the first."""
    wanted: dict[str, tuple[Record, Fact]] = {}  # by prompt, of the records kept
    kept: list[int] = []
    reasons: list[str] = []
    for index, record in enumerate(records):
        own: dict[str, tuple[Record, Fact]] = {}
        for fact in record.facts:
            prompt = comparable(fact.text)
            first, other = wanted.get(prompt) or own.setdefault(prompt, (record, fact))
            if other.target != fact.target:
                break
        else:
            wanted |= own
            kept.append(index)
            continue
        message = (
            f"record {record.id} asks for {fact.target!r} after {other.text!r}, record {first.id} for "
            f"{other.target!r}, expected one target: keep one of them"
        )
        if not skip_bad:
            raise InputError(f"{message}, or skip bad records")
        reasons.append(message)
    return records.keep(kept, reasons)


def _name(source: object) -> str:
    if isinstance(source, (str, Path)):
        return str(source) if str(source).startswith(HUB) else Path(source).name
    return "records"


# Where raw records come from


def _raw(source: Any) -> Iterator[tuple[str, Any]]:
    """Each record as it lies in the source, and what to call it."""
    if isinstance(source, str) and source.startswith(HUB):
        return raw_records(_from_hub(source))
    if isinstance(source, (str, Path)) and not Path(source).exists():
        raise InputError(
            f"no file {source}, expected one of records: check its name (a dataset of the Hub is hf:name:split)"
        )
    return raw_records([source] if isinstance(source, Record) else source)


def _from_hub(name: str) -> Iterable[Any]:
    """The rows of a dataset of the Hub."""
    repository, _, split = name.removeprefix(HUB).partition(":")
    if not repository:
        raise InputError(f"dataset is {name!r}, expected a name as in 'hf:azhx/counterfact:test': name one")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]  # not one of ours: only for those who use it
    except ImportError:
        raise InputError(
            f"{name} is a dataset of the Hub, which needs the package datasets: pip install datasets, or pass a file"
        ) from None
    try:
        return list(datasets.load_dataset(repository, split=split or "train"))
    except Exception as problem:  # missing, gated, offline: each with an exception of its own
        line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise InputError(
            f"dataset {repository!r}, split {split or 'train'!r}, cannot be had ({line}): check the name and the "
            f"split (hf:name:split), connect, or pass a file"
        ) from None


# One record


def _record(raw: Any, number: str) -> Record:
    if isinstance(raw, Fact):
        return _plain(raw, {}, number)
    if not isinstance(raw, Mapping):
        return _plain(fact_of(raw), {}, number)
    if isinstance(raw.get("requested_rewrite"), (list, tuple)):
        return _mquake(raw, number)
    if "src" in raw:
        return _zsre(raw, number)
    if "requested_rewrite" in raw or "target_new" in raw:
        return _counterfact(raw, number)
    bare = {name: value for name, value in raw.items() if name not in ("neighbours", "neighbors")}
    return _plain(fact_of(bare), raw, number)


def _plain(fact: Fact, raw: Mapping[str, Any], number: str) -> Record:
    """A record of our own: a fact's fields and the optional ones of `Record`."""
    neighbours = raw.get("neighbours", raw.get("neighbors", fact.neighbours))
    return Record(
        replace(fact, neighbours=()),
        _id(raw, "id") or _tagged(fact) or number,
        tuple(fact_of(one) for one in _list(raw, "also")),
        tuple(_question(one, fact.old) for one in _list({"neighbours": neighbours}, "neighbours")),
        tuple(_consequence(one) for one in _list(raw, "consequences")),
        tuple(_list(raw, "generation_prompts")),
        tuple(_list(raw, "references")),
    )


def _counterfact(raw: Mapping[str, Any], number: str) -> Record:
    """CounterFact, nested or flat, and what EasyEdit and KnowEdit add to it."""
    fact = fact_of(raw)
    neighbours = [_question(prompt, fact.old) for prompt in _list(raw, "neighborhood_prompts")]
    if raw.get("locality_prompt"):
        answer = _first(raw.get("locality_ground_truth"))
        neighbours.append(Question(raw["locality_prompt"], fact.old if answer is None else answer))
    neighbours += _grouped("locality", raw.get("locality"))
    return Record(
        replace(fact, neighbours=()),
        _tagged(fact) or _id(raw, "id") or number,
        neighbours=tuple(neighbours),
        consequences=tuple(_portability(raw.get("portability"))),
        generation_prompts=tuple(_list(raw, "generation_prompts")),
        references=tuple(_list(raw, "references")) or _completed(_list(raw, "attribute_prompts"), fact.target),
    )


def _zsre(raw: Mapping[str, Any], number: str) -> Record:
    """Its locality prompts are questions of Natural Questions, written without their question mark."""
    fact = fact_of(raw)
    neighbours = []
    if raw.get("loc"):
        require_text("loc", raw["loc"])
        asked = raw["loc"] if raw["loc"].rstrip().endswith("?") else f"{raw['loc']}?"
        neighbours.append(Question(asked, _first(raw.get("loc_ans"))))
    return Record(
        replace(fact, neighbours=()),
        _id(raw, "case_id", "id") or f"zsre/{number}",
        neighbours=tuple(neighbours),
        consequences=tuple(_portability(raw.get("portability"))),
    )


def _mquake(raw: Mapping[str, Any], number: str) -> Record:
    """A case changes one fact or several; its questions go over all of them."""
    kind = "a MQuAKE record"
    rewrites = raw["requested_rewrite"]
    if not rewrites:
        raise InputError("requested_rewrite is empty, expected the facts to write: fill it in")
    case = _id(raw, "case_id") or number
    facts = [_rewritten(rewrite) for rewrite in rewrites]
    answer, aliases = get(raw, "new_answer", kind), tuple(_list(raw, "new_answer_alias"))
    require_text("new_answer", answer)
    questions = _listed("questions", get(raw, "questions", kind))
    return Record(
        replace(facts[0], tags=(f"mquake/{case}",)),
        f"mquake/{case}",
        also=tuple(facts[1:]),
        consequences=tuple(Question(prompt, answer, aliases) for prompt in questions),
    )


def _rewritten(rewrite: Any) -> Fact:
    """One fact of a case; its question is a paraphrase of its prompt."""
    fact = fact_of({"requested_rewrite": rewrite})
    return replace(fact, paraphrases=(rewrite["question"],)) if rewrite.get("question") else fact


def _portability(given: Any) -> list[Question]:
    """EasyEdit's one question, or KnowEdit's questions in groups."""
    if isinstance(given, Mapping) and "New Question" in given:
        answer = _first(get(given, "New Answer", "a portability record"))
        return [Question(given["New Question"], answer)]
    return _grouped("portability", given)


def _grouped(name: str, given: Any) -> list[Question]:
    """Questions in named groups, each {prompt, ground_truth}; answers may be lists, of wordings."""
    if isinstance(given, Mapping):
        groups = [_listed(f"group {group!r} of {name}", some or ()) for group, some in given.items()]
    elif given is None or isinstance(given, (list, tuple)):
        groups = [given or ()]
    else:
        raise InputError(f"{name} is {given!r}, expected questions in groups: write them as {{group: [question]}}")
    found = []
    for one in (one for group in groups for one in group):
        answers = _flat(get(one, "ground_truth", "a question"))
        found.append(Question(get(one, "prompt", "a question"), answers[0] if answers else "", tuple(answers[1:])))
    return found


def _question(given: Any, answer: str | None = None) -> Question:
    """A prompt alone, whose answer is known from elsewhere, or a prompt with its answer and aliases."""
    if isinstance(given, Mapping):
        own = given.get("answer", answer)
        return Question(get(given, "prompt", "a question"), own, tuple(_list(given, "aliases")))
    return Question(given, answer)


def _consequence(given: Any) -> Question:
    get(given, "answer", "a consequence")
    return _question(given)


def _completed(prompts: Sequence[str], target: str) -> tuple[str, ...]:
    """Sentences about other subjects for which the new target is true."""
    for prompt in prompts:
        require_text("an entry of attribute_prompts", prompt)
    return tuple(f"{prompt.rstrip()} {target}." for prompt in prompts)


def _list(raw: Mapping[str, Any], name: str) -> Sequence[Any]:
    return _listed(name, raw.get(name) or ())


def _listed(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise InputError(f"{name} is {value!r}, expected a list: wrap it in brackets")
    return value


def _flat(value: Any) -> list[Any]:
    return [part for one in value for part in _flat(one)] if isinstance(value, (list, tuple)) else [value]


def _first(value: Any) -> Any:
    flat = _flat(value)
    return flat[0] if flat else None


def _id(raw: Mapping[str, Any], *names: str) -> str | None:
    """What the first of these fields that is not null says."""
    return next((str(raw[name]) for name in names if raw.get(name) is not None), None)


def _tagged(fact: Fact) -> str | None:
    """The name that the reader gave a dataset's record, as in counterfact/17."""
    return next((tag for tag in fact.tags if "/" in tag), None)
