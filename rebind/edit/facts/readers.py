"""Reading facts: from files, from the datasets of the literature, from what a caller has in hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from rebind.edit.facts.fact import Fact, escape, find, get, require_text
from rebind.errors import InputError

LISTS = ("paraphrases", "neighbours", "neighbors", "tags")  # fields of our own records


@dataclass(frozen=True)
class Facts(Sequence[Fact]):
    """The facts of a source, and why each of the records left out was left out."""

    facts: tuple[Fact, ...]
    skipped: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)  # of each fact's record: "line 3 of facts.jsonl (id x)"

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
    """The facts in a file (JSONL, JSON or CSV), or in an iterable of facts, dicts or (prompt, target) pairs.

    Records may be ours (prompt, subject, target and the optional fields of `Fact`; without a subject, braces
    mark it), CounterFact's (nested as published, or flat as in EasyEdit), zsRE's or Knowns': they are told
    apart by their keys. A record that cannot be read is an error that names it; with `skip_bad` it is left
    out and the reason kept in `skipped`. `limit` counts the facts kept.
    """
    if limit is not None and limit < 0:
        raise InputError(f"limit is {limit}, expected 0 or more: leave it out to read everything")
    facts: list[Fact] = []
    skipped: list[str] = []
    names: list[str] = []
    for where, record in raw_records(source):
        if limit is not None and len(facts) >= limit:
            break
        try:
            facts.append(fact_of(record))
            names.append(where + _case_name(record))
        except (InputError, RecursionError) as problem:
            message = described(problem, where, record)
            if not skip_bad:
                raise InputError(message) from None
            skipped.append(message)
    return Facts(tuple(facts), tuple(skipped), tuple(names))


def raw_records(source: object) -> Iterator[tuple[str, Any]]:
    """Each record, and what to call it."""
    if isinstance(source, (str, Path)):
        yield from _from_file(Path(source))
        return
    if isinstance(source, (Fact, Mapping)):
        source = [source]
    if not isinstance(source, Iterable):
        raise InputError(f"facts are {type(source).__name__}, expected a path or a list of facts: pass one of these")
    for index, record in enumerate(source):
        yield f"record {index}", record


def _from_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no file {path}, expected one of facts: check its name") from None
    except UnicodeDecodeError as problem:
        raise InputError(f"{path} is not UTF-8 (byte {problem.start}): save it as UTF-8") from None
    except OSError as problem:
        raise InputError(f"{path} cannot be read ({problem.strerror}): pass a JSONL, JSON or CSV file") from None
    if path.suffix.lower() in (".csv", ".tsv"):
        rows = _csv_rows(path, text)
    elif text.lstrip().startswith("["):
        rows = _json_list(path, text)
    elif text.lstrip().startswith("{"):
        rows = _json_lines(path, text)
    elif text.strip():
        rows = _csv_rows(path, text)
    else:
        raise InputError(f"{path} is empty, expected facts: one JSON object a line will do")
    yield from rows


def _json_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path} is not JSON ({problem}): repair it there") from None
    for index, record in enumerate(records):
        yield f"record {index} of {path.name}", record


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(text)  # one object, perhaps over several lines
    except (ValueError, RecursionError):
        pass
    else:
        yield f"the record of {path.name}", whole
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as problem:
                record = InputError(f"not JSON ({problem}), expected one object a line: repair it there")
            yield f"line {number} of {path.name}", record


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    header = text.split("\n", 1)[0]
    delimiter = max("\t;,", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = [name.strip().lower() for name in reader.fieldnames or ()]
    except csv.Error as problem:
        raise InputError(f"line 1 of {path} is not CSV ({problem}): repair it there, or pass JSONL") from None
    if "prompt" not in names and "src" not in names:
        raise InputError(
            f"{path} has columns {', '.join(names)}, expected prompt, subject and target in its first line: "
            f"name the columns, or pass JSONL"
        )
    reader.fieldnames = names
    try:
        for row in reader:
            yield f"line {reader.line_num} of {path.name}", _cells(row)
    except csv.Error as problem:
        raise InputError(f"line {reader.line_num} of {path} is not CSV ({problem}): repair it there") from None


def _cells(row: dict[str | None, Any]) -> object:
    """A row as a record: empty cells are absent, lists are split at their bars."""
    if None in row:
        return InputError(f"has {len(row[None])} cells too many: quote cells that hold the separator")
    record: dict[str, Any] = {str(name): cell for name, cell in row.items() if cell and cell.strip()}
    for name in LISTS:
        if name in record:
            record[name] = [part.strip() for part in record[name].split(" | ")]
    return record


def described(problem: Exception, where: str, record: object) -> str:
    """What is wrong with a record, with its name in front."""
    if isinstance(problem, RecursionError):
        problem = InputError("lists are nested too deep to be read, expected two or three: repair it there")
    return f"{where}{_case_name(record)}: {problem}"


def _case_name(record: object) -> str:
    if isinstance(record, Mapping):
        for key in ("case_id", "known_id", "id"):
            if isinstance(record.get(key), (str, int)):
                return f" ({key} {record[key]})"
    return ""


def fact_of(record: object) -> Fact:
    if isinstance(record, Fact):
        return record
    if isinstance(record, InputError):  # a line or row that could not be read
        raise record
    if isinstance(record, (tuple, list)) and len(record) == 2:
        return Fact.parse(*record)
    if not isinstance(record, Mapping):
        raise InputError(f"got {record!r}, expected a fact, an object with prompt and target, or a pair of these")
    for keys, read in FORMATS:
        if keys & record.keys():
            return read(record)
    for name in LISTS:
        _texts(record, name)
    return Fact.from_json(record)


def _counterfact(record: Mapping[str, Any]) -> Fact:
    kind = "a CounterFact record"
    rewrite = get(record, "requested_rewrite", kind)
    prompt = get(record, "requested_rewrite.prompt", kind)
    require_text("requested_rewrite.prompt", prompt)
    before, *afters = prompt.split("{}")
    if len(afters) != 1:
        raise InputError(f"prompt {prompt!r} holds {len(afters)} {{}}, expected one where the subject stands")
    return Fact(
        f"{escape(before)}{{}}{escape(afters[0])}",
        get(record, "requested_rewrite.subject", kind),
        get(record, "requested_rewrite.target_new.str", kind),
        get(record, "requested_rewrite.target_true.str", kind) if "target_true" in rewrite else None,
        _texts(record, "paraphrase_prompts"),
        _texts(record, "neighborhood_prompts"),
        _tags("counterfact", record.get("case_id"), rewrite.get("relation_id")),
    )


def _flat(record: Mapping[str, Any]) -> Fact:
    kind = "a flat CounterFact record"
    return _literal(
        get(record, "prompt", kind),
        get(record, "subject", kind),
        get(record, "target_new", kind),
        old=_first(record.get("ground_truth")),
        paraphrases=_optional(record.get("rephrase_prompt")),
        neighbours=_optional(record.get("locality_prompt")),
        tags=_tags("counterfact", record.get("case_id")),
    )


def _zsre(record: Mapping[str, Any]) -> Fact:
    """The prompt is a question, the target MEND's alternative answer.

    Where that is one of the true answers there is no old answer to push out, so `old` stays empty.
    """
    kind = "a zsRE record"
    target, answers = get(record, "alt", kind), _answers(record)
    return _literal(
        get(record, "src", kind),
        get(record, "subject", kind),
        target,
        old=None if target in answers else answers[0],
        paraphrases=_optional(record.get("rephrase")),
        neighbours=_optional(record.get("loc")),
        tags=("zsre",),
    )


def _answers(record: Mapping[str, Any]) -> list[Any]:
    """The true answers: a list, or one text in some copies; what a model said where there are none."""
    given = record.get("answers") or [record.get("pred")]
    if not isinstance(given, (str, list, tuple)):
        raise InputError(f"answers is {given!r}, expected a list of texts: write them in brackets")
    return [given] if isinstance(given, str) else list(given)


def _knowns(record: Mapping[str, Any]) -> Fact:
    """What a model knows already. The prompt is the one it was asked; `template` is often shorter."""
    kind = "a Knowns record"
    return _literal(
        get(record, "prompt", kind),
        get(record, "subject", kind),
        get(record, "attribute", kind),
        tags=_tags("knowns", record.get("known_id"), record.get("relation_id")),
    )


# The keys that give a format away, in the order they are asked for.
FORMATS = (
    ({"requested_rewrite"}, _counterfact),
    ({"src"}, _zsre),
    ({"known_id", "attribute"}, _knowns),
    ({"target_new", "ground_truth", "rephrase_prompt", "locality_prompt"}, _flat),
)


def _literal(prompt: object, subject: object, target: Any, **optional: Any) -> Fact:
    """A fact from a dataset's own text, where braces are nothing but braces."""
    require_text("prompt", prompt)
    require_text("subject", subject)
    core = str(subject).strip()
    before, after = find(core, in_text=str(prompt))
    return Fact(f"{escape(before)}{{}}{escape(after)}", core, target, **optional)


def _first(value: Any) -> Any:
    """Some copies hold a list of answers where others hold one."""
    return (value[0] if value else None) if isinstance(value, list) else value


def _texts(record: Mapping[str, Any], name: str) -> Any:
    """A list of texts, which `Fact` looks into; of an object it would take the keys."""
    value = record.get(name, ())
    if isinstance(value, Mapping):
        raise InputError(f"{name} is {value!r}, expected a list of texts: write them in brackets")
    return value


def _optional(value: Any) -> tuple[Any, ...]:
    return () if value is None or value == "" else (value,)


def _tags(origin: str, number: object, relation: object = None) -> tuple[str, ...]:
    name = origin if number is None else f"{origin}/{number}"
    return (name,) if relation is None else (name, str(relation))
