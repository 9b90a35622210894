"""Select the records that a model can be evaluated with: those that fit, do not conflict, and are known to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rebind.edit.editor import Editor
from rebind.edit.facts.conflicts import conflicts
from rebind.errors import InputError
from rebind.evals.answers import all_prompts
from rebind.evals.protocols import Protocol
from rebind.evals.records import Record, Records, without_conflicts


def usable_records(
    editor: Editor, records: Records, protocol: Protocol, *, skip_bad: bool, limit: int | None = None
) -> Records:
    """Return the records that fit into the model's context and can be written; others raise or are skipped.

    No record may contradict itself and, if records are written together, no two may contradict each other. With a
    `limit`, records after the first `limit` usable ones are neither checked nor counted.
    """
    wanted = len(records) if limit is None else limit
    selected: list[int] = []
    reasons: list[str] = []
    checked, usable = 0, records.select([])
    while len(usable) < wanted and checked < len(records):
        part = records[checked : checked + wanted - len(usable)]
        fitting, why = _fitting(editor, part, skip_bad)
        selected += [checked + index for index in fitting]
        reasons += why
        checked += len(part)
        usable = records.select(selected, reasons)
        usable = usable if protocol.alone else without_conflicts(usable, skip_bad=skip_bad)
    if not usable and reasons:
        raise InputError(f"No record can be used; the first: {reasons[0]}", code="no_usable_record")
    if limit is None or len(usable) < limit:
        return usable
    new_reasons = usable.skipped[len(records.skipped) :]
    return replace(usable, skipped=(*records.skipped_before(checked), *new_reasons))


def known_records(editor: Editor, records: Records) -> Records:
    """Return the records whose true targets the model prefers to the new ones."""
    with_true = [index for index, record in enumerate(records) if all(fact.old is not None for fact in record.facts)]
    if not with_true and len(records):
        raise InputError(
            f"None of {len(records)} records has a true target",
            advice="Leave out {known}",
            code="no_true_targets",
            settings={"known": None},
        )
    facts = [(index, fact) for index in with_true for fact in records[index].facts]
    prompts = [fact.as_prompt(target) for _, fact in facts for target in (fact.target, fact.old)]
    scores = editor.language_model.score(prompts)
    triples = zip(facts, scores[::2], scores[1::2], strict=True)
    unknown = {index for (index, _), new, true in triples if not true.nll < new.nll}
    selected = [index for index in with_true if index not in unknown]
    if not selected:
        raise InputError(
            f"The model prefers the true target in none of {len(records)} records",
            advice="Leave out {known}",
            code="no_known_record",
            settings={"known": None},
        )
    return replace(records.select(selected), name=f"{records.name}, known")


def _fitting(editor: Editor, records: Sequence[Record], skip_bad: bool) -> tuple[list[int], list[str]]:
    """Return the indices of records that can be encoded and are consistent, and what is wrong with the others."""
    model, contexts = editor.language_model, editor.contexts

    def check(some: Sequence[Record]) -> None:
        for conflict in (conflict for record in some for conflict in conflicts(record.facts)):
            targets = " and ".join(repr(target) for target in dict.fromkeys(conflict.targets))
            raise InputError(
                f"It asks for {targets} after {conflict.text!r}", expected="one target", code="conflicting_targets"
            )
        model.encode([prompt for record in some for prompt in all_prompts(record)])
        facts = [fact.as_prompt() for record in some for fact in record.facts]
        for context in ("", *contexts):
            model.encode(facts, context=context)

    with suppress(InputError):  # if this fails, the loop below finds out which record is the reason
        check(records)
        return list(range(len(records))), []
    selected, reasons = [], []
    for index, record in enumerate(records):
        try:
            check([record])
            selected.append(index)
        except InputError as problem:
            if not skip_bad:
                raise InputError(
                    f"Record {record.id}: {problem.problem}",
                    expected=problem.expected,
                    advice="Correct the record, or use {skip_bad}",
                    code="bad_record",
                    settings={"skip_bad": True},
                ) from None
            reasons.append(f"Record {record.id}: {problem.problem}")
    return selected, reasons
