"""Read facts from files, published datasets and Python objects."""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, overload

from rebind.edit.facts.fact import LIST_FIELDS, Fact, require_field, split_at_subject, template
from rebind.errors import InputError
from rebind.models.prompts import require_text

ID_FIELDS = ("case_id", "known_id", "id")
FIELDS = tuple(field.name for field in fields(Fact))
SIMILAR = 0.85  # similarity of two names from which on one is taken for a misspelling of the other


@dataclass(frozen=True)
class Facts(Sequence[Fact]):
    """The facts of a source, and the reason for each record that was skipped."""

    facts: tuple[Fact, ...]
    skipped: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)  # one per fact, such as "line 3 of facts.jsonl (id x)"

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> Fact: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Fact, ...]: ...
    def __getitem__(self, index: int | slice) -> Fact | tuple[Fact, ...]:
        return self.facts[index]


def read_facts(
    source: str | Path | Fact | Mapping[str, Any] | Iterable[Any], *, limit: int | None = None, skip_bad: bool = False
) -> Facts:
    """Read facts from a file (JSONL, JSON or CSV), or from an iterable of facts, dicts or (prompt, target) pairs.

    A record has the fields of `Fact` (prompt, subject, target and the optional ones; without a subject, braces mark
    it), or the format of CounterFact (nested as published, or flat as in EasyEdit), zsRE or Knowns. The format is
    recognized by its keys. A record that cannot be read raises an error that names it; with `skip_bad` it is skipped,
    and the reason is in `skipped`. `limit` counts the facts that are returned.
    """
    if limit is not None and limit < 0:
        raise InputError(f"The limit is {limit}", expected="0 or more", code="negative_limit")
    facts: list[Fact] = []
    skipped: list[str] = []
    names: list[str] = []
    for name, record in raw_records(source):
        if limit is not None and len(facts) >= limit:
            break
        try:
            facts.append(parse_fact(record))
            names.append(name + _record_id(record))
        except (InputError, RecursionError) as problem:
            error = record_error(problem, name, record)
            if not skip_bad:
                raise error from None
            skipped.append(str(error))
    return Facts(tuple(facts), tuple(skipped), tuple(names))


def record_error(problem: Exception, name: str, record: object) -> InputError:
    """Return the same error with the name of the record in front."""
    if isinstance(problem, InputError):
        error = copy.copy(problem)
    else:  # a RecursionError
        error = InputError("The lists are nested too deep to be read", code="nested_too_deep")
    error.problem = f"{name[:1].upper()}{name[1:]}{_record_id(record)}: {error.problem}"
    return error


def _record_id(record: object) -> str:
    if isinstance(record, Mapping):
        for key in ID_FIELDS:
            if isinstance(record.get(key), (str, int)):
                return f" ({key} {record[key]})"
    return ""


# Files


def raw_records(source: object) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each record of a source. The content of a damaged row is an InputError."""
    if isinstance(source, (str, Path)):
        yield from _records_in_file(Path(source))
        return
    if isinstance(source, (Fact, Mapping)):
        source = [source]
    if not isinstance(source, Iterable):
        raise InputError(f"The facts are {source!r}", expected="a path or a list of facts", code="not_facts")
    for index, record in enumerate(source):
        yield f"record {index}", record


def _records_in_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"There is no file {path}", advice="Check its name", code="file_not_found") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{path} cannot be read as UTF-8 ({problem})", code="unreadable_file") from None
    first_character = text.lstrip()[:1]
    if not first_character:
        raise InputError(f"{path} is empty", expected="facts, for example one JSON object per line", code="empty_file")
    if path.suffix.lower() in (".csv", ".tsv") or first_character not in "[{":
        yield from _csv_rows(path, text)
        return
    try:
        content = json.loads(text)  # a list, or one object on several lines
    except (ValueError, RecursionError) as problem:
        if first_character == "[":
            raise InputError(f"{path} is not JSON ({problem})", code="not_json") from None
        yield from _json_lines(path, text)
        return
    if first_character == "{":
        yield f"line 1 of {path.name}", content
        return
    for index, record in enumerate(content):
        yield f"record {index} of {path.name}", record


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as problem:
                record = InputError(f"It is not JSON ({problem})", expected="one object per line", code="not_json")
            yield f"line {number} of {path.name}", record


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    header = text.split("\n", 1)[0]
    delimiter = max("\t;,", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        if "prompt" not in columns and "src" not in columns:
            raise InputError(
                f"{path} has the columns {', '.join(columns)}",
                expected="prompt, subject and target in the first line",
                advice="Name the columns, or use JSONL",
                code="unknown_columns",
            )
        reader.fieldnames = columns
        for row in reader:
            yield f"line {reader.line_num} of {path.name}", _csv_record(row)
    except csv.Error as problem:
        raise InputError(f"Line {reader.line_num or 1} of {path} is not CSV ({problem})", code="not_csv") from None


def _csv_record(row: dict[str | None, Any]) -> object:
    """Return a row as a record: empty cells are left out, lists are split at " | "."""
    if None in row:
        advice = "Quote cells that contain the separator"
        return InputError(f"It has {len(row[None])} cells too many", advice=advice, code="too_many_cells")
    record: dict[str, Any] = {str(name): cell for name, cell in row.items() if cell and cell.strip()}
    for name in LIST_FIELDS:
        if name in record:
            record[name] = [part.strip() for part in record[name].split(" | ")]
    return record


# Formats


def parse_fact(record: object) -> Fact:
    """Return the fact in a record of any format."""
    if isinstance(record, Fact):
        return record
    if isinstance(record, InputError):  # a row that could not be read
        raise record
    if isinstance(record, (tuple, list)) and len(record) == 2:
        return Fact.parse(*record)
    if not isinstance(record, Mapping):
        expected = "a fact, an object with prompt and target, or a pair of them"
        raise InputError(f"It is {record!r}", expected=expected, code="not_a_fact")
    for keys, parse in FORMATS:
        if keys & record.keys():
            return parse(record)
    reject_misspelled_fields(record, FIELDS)
    return Fact.from_json(record)


def reject_misspelled_fields(record: Mapping[Any, Any], names: Sequence[str]) -> None:
    """Raise if a field of a record is almost one of `names`, such as "neighbours"; other fields are ignored."""
    for name in record:
        if name not in names and (near := get_close_matches(str(name), names, n=1, cutoff=SIMILAR)):
            raise InputError(f"It has a field {name!r}", expected=repr(near[0]), code="misspelled_field")


def _counterfact(record: Mapping[str, Any]) -> Fact:
    kind = "a CounterFact record"
    prompt, subject, target = (
        require_field(record, f"requested_rewrite.{name}", kind) for name in ("prompt", "subject", "target_new.str")
    )
    rewrite = record["requested_rewrite"]
    require_text("requested_rewrite.prompt", prompt)
    before, *after = prompt.split("{}")
    if len(after) != 1:
        raise InputError(f"Prompt {prompt!r} has {len(after)} {{}}", expected="one {}", code="bad_template")
    return Fact(
        template(before, after[0]),
        subject,
        target,
        require_field(record, "requested_rewrite.target_true.str", kind) if "target_true" in rewrite else None,
        record.get("paraphrase_prompts", ()),
        record.get("neighborhood_prompts", ()),
        _tags("counterfact", record.get("case_id"), rewrite.get("relation_id")),
    )


def _flat_counterfact(record: Mapping[str, Any]) -> Fact:
    answers = record.get("ground_truth")  # a list in some copies
    return _literal_fact(
        record,
        ("prompt", "subject", "target_new"),
        "a flat CounterFact record",
        old=next(iter(answers), None) if isinstance(answers, list) else answers,
        paraphrases=_as_tuple(record.get("rephrase_prompt")),
        neighbors=_as_tuple(record.get("locality_prompt")),
        tags=_tags("counterfact", record.get("case_id")),
    )


def _zsre(record: Mapping[str, Any]) -> Fact:
    """Return a fact with a question as its prompt and MEND's alternative answer as its target.

    If that is one of the true answers, there is no old answer to replace, and `old` stays empty.
    """
    answers = record.get("answers") or [record.get("pred")]  # without answers, the prediction of a model
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, (list, tuple)):
        raise InputError(f"Answers is {answers!r}", expected="a list of texts", code="not_a_list")
    return _literal_fact(
        record,
        ("src", "subject", "alt"),
        "a zsRE record",
        old=None if record.get("alt") in answers else answers[0],
        paraphrases=_as_tuple(record.get("rephrase")),
        neighbors=_as_tuple(record.get("loc")),
        tags=("zsre",),
    )


def _knowns(record: Mapping[str, Any]) -> Fact:
    """Return a fact that a model already knows. (The field `template` is often shorter than the prompt.)"""
    tags = _tags("knowns", record.get("known_id"), record.get("relation_id"))
    return _literal_fact(record, ("prompt", "subject", "attribute"), "a Knowns record", tags=tags)


FORMATS = (  # the keys that identify a format, in the order in which they are tried
    ({"requested_rewrite"}, _counterfact),
    ({"src"}, _zsre),
    ({"known_id", "attribute"}, _knowns),
    ({"target_new", "ground_truth", "rephrase_prompt", "locality_prompt"}, _flat_counterfact),
)


def _literal_fact(record: Mapping[str, Any], fields: tuple[str, str, str], kind: str, **optional: Any) -> Fact:
    """Return a fact from the prompt, subject and target of a dataset, in which braces have no meaning."""
    prompt, subject, target = (require_field(record, name, kind) for name in fields)
    require_text("prompt", prompt)
    require_text("subject", subject)
    subject = subject.strip()
    return Fact(template(*split_at_subject(prompt, subject)), subject, target, **optional)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return () if value is None or value == "" else (value,)


def _tags(dataset: str, number: object, relation: object = None) -> tuple[str, ...]:
    name = dataset if number is None else f"{dataset}/{number}"
    return (name,) if relation is None else (name, str(relation))
