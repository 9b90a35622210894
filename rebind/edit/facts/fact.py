"""`Fact`: a prompt, the subject in it, and the target that the model should say.

Braces mark the subject: `Fact.parse("The capital of {France} is", "Rome")`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rebind.errors import InputError
from rebind.models.prompts import Prompt, require_text

MARKUP = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
MARK_SUBJECT = "Mark the subject with braces, as in 'The capital of {France} is'"
LIST_FIELDS = ("paraphrases", "neighbors", "tags", "questions", "keep")


@dataclass(frozen=True)
class Fact:
    """What the model should say after a prompt.

    >>> fact = Fact.parse("The capital of {France} is", "Rome", old="Paris")
    >>> fact.prompt, fact.subject, fact.text
    ('The capital of {} is', 'France', 'The capital of France is')
    """

    prompt: str  # a template: {} stands for the subject; {{ and }} are literal braces
    subject: str
    target: str  # without a space in front, which encoding adds
    old: str | None = None  # the target before the edit, if it is known
    paraphrases: tuple[str, ...] = ()  # other prompts that should have the same target
    neighbors: tuple[str, ...] = ()  # prompts about other subjects whose answers should stay
    tags: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()  # questions that the target answers, as people ask them in a chat
    keep: tuple[str, ...] = ()  # prompts about the same subject whose answers should stay

    def __post_init__(self) -> None:
        for name in ("prompt", "subject", "target"):
            require_text(name, getattr(self, name))
        for name in LIST_FIELDS:
            object.__setattr__(self, name, _require_texts(name, getattr(self, name)))
        before, marks, after = _split_at_marks(self.prompt)
        if marks != [""]:
            raise InputError(
                f"Prompt {self.prompt!r} is not a template with one {{}}",
                advice=f"{MARK_SUBJECT} and call Fact.parse",
                code="bad_template",
            )
        # Spaces around a subject belong to the prompt, so that the text does not change.
        subject = self.subject.strip()
        left_space, right_space = self.subject.split(subject, 1)
        object.__setattr__(self, "prompt", template(before + left_space, right_space + after))
        object.__setattr__(self, "subject", subject)
        object.__setattr__(self, "target", self.target.strip())
        if self.old is not None:
            require_text("old", self.old)
            object.__setattr__(self, "old", self.old.strip())
            if self.old == self.target:
                raise InputError(
                    f"Target and old are both {self.target!r} for {self.text!r}",
                    advice="Correct one of them, or leave out old",
                    code="target_equals_old",
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
        neighbors: Iterable[str] = (),
        tags: Iterable[str] = (),
        questions: Iterable[str] = (),
        keep: Iterable[str] = (),
    ) -> Fact:
        """Return a fact from a prompt in which braces mark the subject, or from a prompt and the subject in it.

        Braces that are part of the text are doubled: `"In {{a, b}} the first of {Alice}'s letters is"`.
        """
        require_text("prompt", prompt)
        if subject is not None:
            require_text("subject", subject)
            subject = subject.strip()
        before, marks, after = _split_at_marks(prompt)
        if not marks and subject is not None:
            before, after = split_at_subject(before, subject)
            marks = [subject]
        subjects = {mark for mark in (*marks, subject) if mark}
        if len(marks) != 1 or len(subjects) != 1:
            marked = ", ".join(repr(mark) for mark in (*marks, subject) if mark)
            raise InputError(
                f"Prompt {prompt!r} marks {marked or 'no subject'}",
                expected="one subject in one pair of braces",
                advice=f"{MARK_SUBJECT}, and double the braces that are part of the text",
                code="several_subjects" if subjects else "no_subject",
            )
        # The constructor turns lists into tuples, and rejects a single string.
        lists: Any = (paraphrases, neighbors, tags, questions, keep)
        return cls(template(before, after), subjects.pop(), target, old, *lists)

    @property
    def parts(self) -> tuple[str, str]:
        """The text before the subject and the text after it."""
        before, _, after = _split_at_marks(self.prompt)
        return before, after

    @property
    def text(self) -> str:
        """The prompt with the subject in place."""
        before, after = self.parts
        return before + self.subject + after

    def as_prompt(self, target: str | None = None) -> Prompt:
        """Return the prompt for a model, with the target of this fact or another one."""
        begin = len(self.parts[0])
        return Prompt(self.text, self.target if target is None else target, (begin, begin + len(self.subject)))

    def to_json(self) -> dict[str, Any]:
        """Return a dict without the fields that are empty."""
        optional = {"old": self.old, **{name: list(getattr(self, name)) for name in LIST_FIELDS}}
        present = {name: value for name, value in optional.items() if value}
        return {"prompt": self.prompt, "subject": self.subject, "target": self.target, **present}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Fact:
        """Return a fact from the fields of `to_json`; braces in the prompt may mark the subject instead."""
        prompt, target = (require_field(record, name, "a fact") for name in ("prompt", "target"))
        lists = {name: record.get(name, ()) for name in LIST_FIELDS}
        return cls.parse(prompt, target, subject=record.get("subject"), old=record.get("old"), **lists)


def require_field(record: Mapping[str, Any], path: str, kind: str) -> Any:
    """Return the value at a dotted path, or raise an error that names the missing key."""
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            present = ", ".join(value) if isinstance(value, Mapping) else repr(value)
            expected = f"{path} in {kind}"
            raise InputError(f"There is no {key!r} (but {present})", expected=expected, code="missing_field")
        value = value[key]
    return value


def split_at_subject(text: str, subject: str) -> tuple[str, str]:
    """Return the text before and after the only occurrence of the subject.

    "Iran" occurs twice in "Iran's and Iranian", but once as a separate word, which is taken as the subject.
    """
    starts = [match.start() for match in re.finditer(f"(?={re.escape(subject)})", text)]
    if len(starts) > 1:
        words = [match.start() for match in re.finditer(rf"(?<!\w)(?={re.escape(subject)}(?!\w))", text)]
        starts = words if len(words) == 1 else starts
    if len(starts) == 1:
        return text[: starts[0]], text[starts[0] + len(subject) :]
    hint = " in the same case, spacing and encoding" if comparable(subject) in comparable(text) else ""
    problem, code = f"is not in prompt {text!r}{hint}", "subject_not_in_prompt"
    if starts:
        problem, code = f"occurs {len(starts)} times in prompt {text!r}", "subject_not_unique"
    raise InputError(f"Subject {subject!r} {problem}", advice=MARK_SUBJECT, code=code)


def escape_braces(text: str) -> str:
    """Double the braces, so that `Fact` reads them as text."""
    return text.replace("{", "{{").replace("}", "}}")


def template(before: str, after: str) -> str:
    """Return the prompt of a `Fact` from the text before and after its subject."""
    return f"{escape_braces(before)}{{}}{escape_braces(after)}"


def comparable(text: str) -> str:
    """Return text in a form for comparison: without differences in case, spacing and the encoding of accents."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _require_texts(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise InputError(f"{name.capitalize()} is {values!r}", expected="a list of texts", code="not_a_list")
    texts = tuple(values)
    for text in texts:
        require_text(f"an entry of {name}", text)
    return texts


def _split_at_marks(prompt: str) -> tuple[str, list[str], str]:
    """Return the text before the first mark, the content of each mark, and the text after, with braces unescaped."""
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
                f"Prompt {prompt!r} has a single {mark[0]!r} at position {mark.start()}",
                advice=f"{MARK_SUBJECT}, and double the braces that are part of the text",
                code="unpaired_brace",
            )
    sides[-1] += prompt[end:]
    return sides[0], marks, "".join(sides[1:])
