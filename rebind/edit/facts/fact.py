"""Facts: what a model shall say, and which facts cannot stand together.

A fact is a prompt, the subject in it and the target that should follow; braces mark the subject:

    Fact.parse("The capital of {France} is", "Rome")
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rebind.errors import InputError
from rebind.models.prompts import Prompt

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
            require_text(name, getattr(self, name))
        for name in ("paraphrases", "neighbours", "tags"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        before, marks, after = _scan(self.prompt)
        if marks != [""]:
            held = f"{{{marks[0]}}}" if len(marks) == 1 else f"{len(marks)} pairs of braces"
            raise InputError(f"prompt {self.prompt!r} holds {held}, expected one {{}}: {MARK_IT} and call Fact.parse")
        # Spaces round a subject belong to the sentence: the text stays as it was given.
        core = self.subject.strip()
        lead, trail = self.subject.split(core, 1)
        object.__setattr__(self, "prompt", f"{escape(before + lead)}{{}}{escape(trail + after)}")
        object.__setattr__(self, "subject", core)
        object.__setattr__(self, "target", self.target.strip())
        if self.old is not None:
            require_text("old", self.old)
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
        require_text("prompt", prompt)
        if subject is not None:
            require_text("subject", subject)
            subject = subject.strip()
        before, marks, after = _scan(prompt)
        if len(marks) > 1:
            raise InputError(
                f"prompt {prompt!r} marks {len(marks)} subjects, expected one: double the braces that are not "
                f"the subject's ({{{{ and }}}})"
            )
        if not marks:
            if subject is None:
                raise InputError(f"prompt {prompt!r} marks no subject: {MARK_IT}, or name it as subject")
            before, after = find(subject, in_text=before)
            marks = [subject]
        if subject is not None and marks[0] not in ("", subject):
            raise InputError(
                f"prompt {prompt!r} marks {marks[0]!r} and the subject given is {subject!r}, expected one of them: "
                f"double the braces that are not the subject's ({{{{ and }}}}), or name no other subject"
            )
        found = marks[0] or subject
        if found is None:
            raise InputError(f"prompt {prompt!r} has empty braces: write the subject in them, or name it as subject")
        template = f"{escape(before)}{{}}{escape(after)}"
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

    def as_prompt(self, target: str | None = None) -> Prompt:
        """Return the prompt to put to a model, with the target of this fact or another one."""
        before, after = self.parts
        subject = (len(before), len(before) + len(self.subject))
        return Prompt(before + self.subject + after, self.target if target is None else target, subject)

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


def require_text(name: str, value: object) -> None:
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
        raise InputError(f"{name} is {values!r}, expected a list of texts: wrap it, as in [{_quoted(values)}]")
    texts = tuple(values)
    for text in texts:
        require_text(f"an entry of {name}", text)
    return texts


def _quoted(value: object) -> str:
    """As JSON has it, which Python reads too."""
    return json.dumps(value, ensure_ascii=False, default=repr)


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


def escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def find(subject: str, *, in_text: str) -> tuple[str, str]:
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
    alike = comparable(subject) in comparable(in_text)
    hint = "it is there in other capitals, spaces or code points: copy it from the prompt" if alike else MARK_IT
    raise InputError(f"subject {subject!r} is not in prompt {in_text!r}: {hint}")


def comparable(text: str) -> str:
    """Text as a reader compares it: without regard to case, spacing or the way accents are encoded."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _plain(record: Mapping[str, Any]) -> Fact:
    neighbours = record.get("neighbours", record.get("neighbors", ()))
    return Fact.parse(
        get(record, "prompt", "a fact"),
        get(record, "target", "a fact"),
        subject=record.get("subject"),
        old=record.get("old"),
        paraphrases=record.get("paraphrases", ()),
        neighbours=neighbours,
        tags=record.get("tags", ()),
    )


def get(record: Mapping[str, Any], path: str, kind: str) -> Any:
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
    groups = _grouped(facts, [comparable(fact.text) for fact in facts])
    return [group for group in groups if len(set(group.targets)) > 1]


def rivals(facts: Sequence[Fact]) -> list[Conflict]:
    """Facts of different prompts and targets that read alike up to the end of the subject, where they are written.

    They have one key between them: what a matrix gives for it is a compromise of what each asks for.
    """
    groups = _grouped(facts, [fact.parts[0] + fact.subject for fact in facts])
    return [
        group
        for group in groups
        if len(set(group.targets)) > 1 and len({comparable(facts[index].text) for index in group.indices}) > 1
    ]


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
