"""Select the records for an evaluation: those that fit the model, do not conflict, and are known to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rebind.edit.editor import Editor
from rebind.edit.facts.fact import comparable
from rebind.errors import InputError
from rebind.evals.answers import encode_all
from rebind.evals.protocols import Protocol
from rebind.evals.reading import select
from rebind.evals.records import Record, Records

Targets = dict[str, tuple[str, str]]  # prompt → (id of a record, its target after this prompt)


def usable_records(
    editor: Editor, records: Records, protocol: Protocol, *, skip_bad: bool, limit: int | None = None
) -> Records:
    """Return the records that fit into the model's context and can be written; others raise or are skipped.

    No record may contradict itself and, if records are written together, no two may contradict each other. With a
    `limit`, checking stops after that many usable records.
    """
    targets: Targets = {}

    def check(record: Record) -> None:
        encode_all(editor.language_model, record)  # raises if a prompt is too long
        editor.fact_prompts(record.written_facts)  # raises if one is too long in a framing
        _require_one_target(record, {} if protocol.alone else targets)

    return _select(records, check, skip_bad=skip_bad, limit=limit)


def without_conflicts(records: Records, *, skip_bad: bool) -> Records:
    """Return records that can be written together: of two with different targets for one prompt, the first."""
    targets: Targets = {}
    return _select(records, lambda record: _require_one_target(record, targets), skip_bad=skip_bad)


def known_records(editor: Editor, records: Records) -> Records:
    """Return the records whose true targets the model prefers to the new ones."""
    facts = [fact for record in records for fact in record.facts if fact.old is not None]
    scores = editor.language_model.score(
        [fact.as_prompt(target) for fact in facts for target in (fact.target, fact.old)]
    )
    pairs = zip(facts, scores[::2], scores[1::2], strict=True)
    known_facts = {fact for fact, new, true in pairs if true.nll < new.nll}
    selected = [record for record in records if known_facts.issuperset(record.facts)]
    if not selected:
        raise InputError(
            f"The model prefers the true target in none of {len(records)} records ({len(facts)} facts have one)",
            advice="Leave out {known}",
            code="no_known_record",
            settings={"known": None},
        )
    return replace(records, records=tuple(selected), name=f"{records.name}, known")


def _select(records: Records, check: Callable[[Record], None], *, skip_bad: bool, limit: int | None = None) -> Records:
    """Return the first `limit` records that pass a check, with the reasons why others were skipped."""

    def checked(record: Record) -> Record:
        check(record)
        return record

    items = ((f"record {record.id}", record) for record in records)
    selected, reasons = select(items, checked, skip_bad=skip_bad, limit=limit)
    if not selected and reasons:
        raise InputError(f"No record can be used; the first: {reasons[0]}", code="no_usable_record")
    return Records(tuple(selected), records.name, (*records.skipped, *reasons))


def _require_one_target(record: Record, targets: Targets) -> None:
    """Raise if a prompt of the record has another target in `targets` or in the record itself, else add them."""
    new_targets: Targets = {}
    for fact in record.facts:
        prompt = comparable(fact.text)
        record_id, target = targets.get(prompt) or new_targets.setdefault(prompt, (record.id, fact.target))
        if target != fact.target:
            raise InputError(
                f"Its target after {fact.text!r} is {fact.target!r}, and that of record {record_id} is {target!r}",
                expected="one target per prompt",
                code="conflicting_records",
            )
    targets |= new_targets
