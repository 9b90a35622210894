"""Facts: what a model shall say, where they are read from, and which tokens they are made of.

A fact is a prompt, the subject in it and the target that should follow:

    Fact.parse("The capital of {France} is", "Rome")

Editing needs two things of its tokens: which one is the subject's last (there the key is read and
the value written), and which ones are the target's. Both are found in the text as the model will
see it, by the tokenizer's offset mapping. Counting the tokens of the subject alone, as is often
done, is wrong as soon as the subject is tokenised differently in its sentence.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rebind.errors import InputError

MARKUP = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
MARK_IT = "mark the subject with braces, as in 'The capital of {France} is'"


# Facts


@dataclass(frozen=True)
class Fact:
    """What the model shall say after a prompt.

    >>> fact = Fact.parse("The capital of {France} is", "Rome", old="Paris")
    >>> fact.prompt, fact.subject, fact.text
    ('The capital of {} is', 'France', 'The capital of France is')
    """

    prompt: str  # a template: one {} where the subject stands; {{ and }} are literal braces
    subject: str
    target: str  # without the space in front: `encode` puts it there
    old: str | None = None  # what the model said before, where that is known
    paraphrases: tuple[str, ...] = ()  # other wordings that should give the target too
    neighbours: tuple[str, ...] = ()  # prompts about other subjects whose answers should stay
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "subject", "target"):
            _require_text(name, getattr(self, name))
        for name in ("paraphrases", "neighbours", "tags"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        before, marks, after = _scan(self.prompt)
        if marks != [""]:
            held = f"{{{marks[0]}}}" if len(marks) == 1 else f"{len(marks)} pairs of braces"
            raise InputError(f"prompt {self.prompt!r} holds {held}, expected one {{}}: {MARK_IT} and call Fact.parse")
        # Spaces round a subject belong to the sentence: the text stays as it was given.
        core = self.subject.strip()
        lead, trail = self.subject.split(core, 1)
        object.__setattr__(self, "prompt", f"{_escape(before + lead)}{{}}{_escape(trail + after)}")
        object.__setattr__(self, "subject", core)
        object.__setattr__(self, "target", self.target.strip())
        if self.old is not None:
            _require_text("old", self.old)
            object.__setattr__(self, "old", self.old.strip())
            if self.old == self.target:
                raise InputError(
                    f"target and old are both {self.target!r} for {self.text!r}, expected a new target: "
                    f"leave out old, or correct one of them"
                )

    @classmethod
    def parse(
        cls,
        prompt: str,
        target: str,
        *,
        subject: str | None = None,
        old: str | None = None,
        paraphrases: Iterable[str] = (),
        neighbours: Iterable[str] = (),
        tags: Iterable[str] = (),
    ) -> Fact:
        """A fact from a prompt whose braces mark the subject, or from a prompt and the subject in it.

        Braces meant as such are doubled: `"In {{a, b}} the first of {Alice}'s letters is"`.
        """
        _require_text("prompt", prompt)
        if subject is not None:
            _require_text("subject", subject)
            subject = subject.strip()
        before, marks, after = _scan(prompt)
        if len(marks) > 1:
            raise InputError(
                f"prompt {prompt!r} marks {len(marks)} subjects, expected one: double the braces that are not "
                f"the subject's ({{{{ and }}}})"
            )
        if not marks:
            if subject is None:
                raise InputError(f"prompt {prompt!r} marks no subject: {MARK_IT}, or pass subject=")
            before, after = _find(subject, in_text=before)
            marks = [subject]
        if subject is not None and marks[0] not in ("", subject):
            raise InputError(
                f"prompt {prompt!r} marks {marks[0]!r} and the subject given is {subject!r}, expected one of them: "
                f"double the braces that are not the subject's ({{{{ and }}}}), or leave out subject="
            )
        found = marks[0] or subject
        if found is None:
            raise InputError(f"prompt {prompt!r} has empty braces: write the subject inside them, or pass subject=")
        template = f"{_escape(before)}{{}}{_escape(after)}"
        # The constructor makes tuples of these, and refuses a bare string.
        return cls(template, found, target, old, paraphrases, neighbours, tags)  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[str, str]:
        """The text before the subject and the text after it."""
        before, _, after = _scan(self.prompt)
        return before, after

    @property
    def text(self) -> str:
        """The prompt with the subject in place."""
        before, after = self.parts
        return before + self.subject + after

    def to_json(self) -> dict[str, Any]:
        """A plain dict, without what is not there."""
        lists = {name: list(getattr(self, name)) for name in ("paraphrases", "neighbours", "tags")}
        optional = {"old": self.old, **lists}
        told = {name: value for name, value in optional.items() if value}
        return {"prompt": self.prompt, "subject": self.subject, "target": self.target, **told}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Fact:
        """What `to_json` wrote."""
        return _plain(record)


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r} ({type(value).__name__}), expected text: write it as a string")
    if not value.strip():
        raise InputError(f"{name} is {value!r}, expected text that is not empty: fill it in")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise InputError(
            f"{name} {value!r} holds half a character at position {problem.start}, expected valid Unicode: "
            f"repair the file it comes from"
        ) from None


def _texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{name} is {values!r}, expected a list of texts: wrap it, as in [{values!r}]")
    texts = tuple(values)
    for text in texts:
        _require_text(f"an entry of {name}", text)
    return texts


def _scan(prompt: str) -> tuple[str, list[str], str]:
    """The text before the first mark, what each mark holds, the text after it; doubled braces made single."""
    sides: list[str] = [""]
    marks: list[str] = []
    end = 0
    for mark in MARKUP.finditer(prompt):
        sides[-1] += prompt[end : mark.start()]
        end = mark.end()
        if mark[1] is not None:
            marks.append(mark[1])
            sides.append("")
        elif len(mark[0]) == 2:
            sides[-1] += mark[0][0]
        else:
            raise InputError(
                f"prompt {prompt!r} has a lone {mark[0]!r} at position {mark.start()}, expected pairs: {MARK_IT}, "
                f"and double braces that are meant as such"
            )
    sides[-1] += prompt[end:]
    return sides[0], marks, "".join(sides[1:])


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _find(subject: str, *, in_text: str) -> tuple[str, str]:
    """What stands before and after the one place where the subject occurs.

    "Iran" is in "Iran's and Iranian" twice, but only once as a word of its own: that is where it is.
    """
    places = [match.start() for match in re.finditer(f"(?={re.escape(subject)})", in_text)]
    if len(places) > 1:
        words = [match.start() for match in re.finditer(rf"(?<!\w)(?={re.escape(subject)}(?!\w))", in_text)]
        places = words if len(words) == 1 else places
    if len(places) == 1:
        return in_text[: places[0]], in_text[places[0] + len(subject) :]
    if places:
        raise InputError(f"subject {subject!r} is in prompt {in_text!r} {len(places)} times, expected once: {MARK_IT}")
    alike = _fold(subject) in _fold(in_text)
    hint = "it is there in other capitals, spaces or code points: copy it from the prompt" if alike else MARK_IT
    raise InputError(f"subject {subject!r} is not in prompt {in_text!r}: {hint}")


def _fold(text: str) -> str:
    """Text as a reader compares it: without regard to case, spacing or the way accents are encoded."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


# Facts that cannot stand together


@dataclass(frozen=True)
class Conflict:
    """Facts with one prompt, by their places in the list that was checked."""

    text: str
    targets: tuple[str, ...]  # one a fact, in order
    indices: tuple[int, ...]

    def __str__(self) -> str:
        places = ", ".join(str(index) for index in self.indices)
        return f"{self.text!r} → {' / '.join(dict.fromkeys(self.targets))} (facts {places})"


def conflicts(facts: Sequence[Fact]) -> list[Conflict]:
    """Facts that ask for different targets after the same prompt, but for case and spacing."""
    groups = _grouped(facts, [_fold(fact.text) for fact in facts])
    return [group for group in groups if len(set(group.targets)) > 1]


def duplicates(facts: Sequence[Fact]) -> list[Conflict]:
    """Facts that are there more than once: the very same prompt and target."""
    return _grouped(facts, [(fact.text, fact.target) for fact in facts])


def _grouped(facts: Sequence[Fact], keys: Sequence[object]) -> list[Conflict]:
    groups: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return [
        Conflict(facts[group[0]].text, tuple(facts[index].target for index in group), tuple(group))
        for group in groups.values()
        if len(group) > 1
    ]


# Reading


@dataclass(frozen=True)
class Facts(Sequence[Fact]):
    """The facts of a source, and why each of the records left out was left out."""

    facts: tuple[Fact, ...]
    skipped: tuple[str, ...] = ()

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
    for where, record in _records(source):
        if limit is not None and len(facts) >= limit:
            break
        try:
            facts.append(_fact(record))
        except InputError as problem:
            message = f"{where}{_case(record)}: {problem}"
            if not skip_bad:
                raise InputError(message) from None
            skipped.append(message)
    return Facts(tuple(facts), tuple(skipped))


def _records(source: object) -> Iterator[tuple[str, Any]]:
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
        raise InputError(f"no file {path}: check the name, or mark a fact's subject with braces") from None
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
    except ValueError as problem:
        raise InputError(f"{path} is not JSON ({problem}): repair it there") from None
    for index, record in enumerate(records):
        yield f"record {index} of {path.name}", record


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(text)  # one object, perhaps over several lines
    except ValueError:
        pass
    else:
        yield f"the record of {path.name}", whole
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as problem:
                record = InputError(f"not JSON ({problem}), expected one object a line: repair it there")
            yield f"line {number} of {path.name}", record


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    header = text.split("\n", 1)[0]
    delimiter = max("\t;,", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = [name.strip().lower() for name in reader.fieldnames or ()]
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
    for name in ("paraphrases", "neighbours", "neighbors", "tags"):
        if name in record:
            record[name] = [part.strip() for part in record[name].split(" | ")]
    return record


def _case(record: object) -> str:
    if isinstance(record, Mapping):
        for key in ("case_id", "known_id", "id"):
            if key in record:
                return f" ({key} {record[key]})"
    return ""


def _fact(record: object) -> Fact:
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
    return _plain(record)


def _plain(record: Mapping[str, Any]) -> Fact:
    neighbours = record.get("neighbours", record.get("neighbors", ()))
    return Fact.parse(
        _get(record, "prompt", "a fact"),
        _get(record, "target", "a fact"),
        subject=record.get("subject"),
        old=record.get("old"),
        paraphrases=record.get("paraphrases", ()),
        neighbours=neighbours,
        tags=record.get("tags", ()),
    )


def _counterfact(record: Mapping[str, Any]) -> Fact:
    kind = "a CounterFact record"
    rewrite = _get(record, "requested_rewrite", kind)
    prompt = _get(record, "requested_rewrite.prompt", kind)
    _require_text("requested_rewrite.prompt", prompt)
    before, *afters = prompt.split("{}")
    if len(afters) != 1:
        raise InputError(f"prompt {prompt!r} holds {len(afters)} {{}}, expected one where the subject stands")
    return Fact(
        f"{_escape(before)}{{}}{_escape(afters[0])}",
        _get(record, "requested_rewrite.subject", kind),
        _get(record, "requested_rewrite.target_new.str", kind),
        _get(record, "requested_rewrite.target_true.str", kind) if "target_true" in rewrite else None,
        record.get("paraphrase_prompts", ()),
        record.get("neighborhood_prompts", ()),
        _tags("counterfact", record.get("case_id"), rewrite.get("relation_id")),
    )


def _flat(record: Mapping[str, Any]) -> Fact:
    kind = "a flat CounterFact record"
    return _literal(
        _get(record, "prompt", kind),
        _get(record, "subject", kind),
        _get(record, "target_new", kind),
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
    target, answers = _get(record, "alt", kind), record.get("answers") or [record.get("pred")]
    return _literal(
        _get(record, "src", kind),
        _get(record, "subject", kind),
        target,
        old=None if target in answers else _first(answers),
        paraphrases=_optional(record.get("rephrase")),
        neighbours=_optional(record.get("loc")),
        tags=("zsre",),
    )


def _knowns(record: Mapping[str, Any]) -> Fact:
    """What a model knows already. The prompt is the one it was asked; `template` is often shorter."""
    kind = "a Knowns record"
    return _literal(
        _get(record, "prompt", kind),
        _get(record, "subject", kind),
        _get(record, "attribute", kind),
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
    _require_text("prompt", prompt)
    _require_text("subject", subject)
    core = str(subject).strip()
    before, after = _find(core, in_text=str(prompt))
    return Fact(f"{_escape(before)}{{}}{_escape(after)}", core, target, **optional)


def _get(record: Mapping[str, Any], path: str, kind: str) -> Any:
    """The entry at a dotted path, or an error that names the key that is missing."""
    value: Any = record
    walked: list[str] = []
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            inside = f" in {'.'.join(walked)}" if walked else ""
            got = ", ".join(value) if isinstance(value, Mapping) else repr(value)
            raise InputError(f"no {key!r}{inside}, which {kind} needs (got {got}): add it, or skip bad records")
        value = value[key]
        walked.append(key)
    return value


def _first(value: Any) -> Any:
    """Some copies hold a list of answers where others hold one."""
    return (value[0] if value else None) if isinstance(value, list) else value


def _optional(value: Any) -> tuple[Any, ...]:
    return () if value is None or value == "" else (value,)


def _tags(origin: str, number: object, relation: object = None) -> tuple[str, ...]:
    name = origin if number is None else f"{origin}/{number}"
    return (name,) if relation is None else (name, str(relation))


# Tokens


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
) -> list[Encoded]:
    """The tokens of each fact behind `context`, in two calls of the tokenizer however many there are.

    `start` is what begins every sequence of this model. The target follows the prompt after a space, unless
    the prompt ends in white space or an opening bracket or quote, or both are in a script written without
    spaces; a space that ends the prompt is taken into the target, where tokenizers want it. `limit` is the
    longest sequence the model takes.

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
    joint, _ = _tokenise([layout.prompt + layout.target for layout in layouts], tokenizer)
    opening = () if chat else tuple(start)
    encoded = []
    for fact, layout, prompt, spans, both in zip(facts, layouts, prompts, offsets, joint, strict=True):
        last = _last_overlap(spans, layout.subject)
        if last is None:
            raise InputError(f"no token of {fact.text!r} stands for subject {fact.subject!r}: use another subject")
        target = both[len(prompt) :] if both[: len(prompt)] == prompt else _tokenise_alone(layout.target, tokenizer)
        if not target:
            raise InputError(f"no token stands for target {fact.target!r} of {fact.text!r}: use another target")
        ids = (*opening, *prompt)
        if limit is not None and len(ids) + len(target) > limit:
            raise InputError(
                f"fact {_shortened(fact.text)!r} → {_shortened(fact.target)!r} is {len(ids) + len(target)} tokens "
                f"with its context, the model takes {limit}: shorten the prompt or the target"
            )
        encoded.append(Encoded(ids, len(opening) + last, tuple(target)))
    return encoded


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
            f"template, expected one with chat=True: leave chat out, or take an instruction-tuned model"
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
    inside = [index for index, (left, right) in enumerate(spans) if max(left, begin) < min(right, end)]
    return inside[-1] if inside else None


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
