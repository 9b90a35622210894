"""Which records a model can be evaluated with: those that fit, that do not contradict each other, that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rebind.edit.editor import Editor
from rebind.edit.facts.encoding import encode_many
from rebind.edit.facts.fact import conflicts
from rebind.errors import InputError
from rebind.evals.answers import questions
from rebind.evals.asking import Model, ask
from rebind.evals.protocols import Protocol
from rebind.evals.records import Record, Records, without_conflicts


def usable(
    editor: Editor, records: Records, protocol: Protocol, *, skip_bad: bool, limit: int | None = None
) -> Records:
    """Records that fit into the model's context and can be written; the others are an error or left out.

    None may contradict itself, and where they are written together, no two each other. With a `limit` the first so
    many: what comes after them is neither looked at nor counted.
    """
    wanted = len(records) if limit is None else limit
    kept: list[int] = []
    reasons: list[str] = []
    seen, found = 0, records.keep([])
    while len(found) < wanted and seen < len(records):
        part = records[seen : seen + wanted - len(found)]
        fitting, why = _fitting(editor, part, skip_bad)
        kept += [seen + index for index in fitting]
        reasons += why
        seen += len(part)
        found = records.keep(kept, reasons)
        found = found if protocol.alone else without_conflicts(found, skip_bad=skip_bad)
    if not found and reasons:
        raise InputError(f"no record can be used, the first because of {reasons[0]}: check the file")
    if limit is None or len(found) < limit:
        return found
    here = found.skipped[len(records.skipped) :]  # what was found out here, not by reading
    return replace(found, skipped=(*records.left_out(seen), *here))


def known(editor: Editor, records: Records) -> Records:
    """Records whose true targets the model as it stands prefers to the new ones."""
    with_true = [index for index, record in enumerate(records) if all(fact.old is not None for fact in record.facts)]
    asked = [(index, fact) for index in with_true for fact in records[index].facts]
    told = ask(Model.of(editor), [(fact.text, str(target)) for _, fact in asked for target in (fact.target, fact.old)])
    pairs = zip(asked, told[::2], told[1::2], strict=True)
    unknown = {index for (index, _), new, true in pairs if not true.nll < new.nll}
    kept = [index for index in with_true if index not in unknown]
    if not with_true and len(records):
        raise InputError(
            f"none of {len(records)} records has a true target, expected some that the model may know: leave out "
            f"--known"
        )
    if not kept:
        raise InputError(
            f"the model prefers the true target in none of {len(records)} records, expected some: leave out --known"
        )
    return replace(records.keep(kept), name=f"{records.name}, known")


def _fitting(editor: Editor, records: Sequence[Record], skip_bad: bool) -> tuple[list[int], list[str]]:
    """The places of those that can be encoded and do not contradict themselves, and what is wrong with the others."""
    model, contexts = Model.of(editor), ("", *editor.contexts)

    def check(some: Sequence[Record]) -> None:
        for clash in (clash for record in some for clash in conflicts(record.facts)):
            wanted = " and ".join(repr(target) for target in dict.fromkeys(clash.targets))
            raise InputError(f"it asks for {wanted} after {clash.text!r}, expected one target: keep one of them")
        model.encode([pair for record in some for pair in questions(record)])
        facts = [fact for record in some for fact in record.facts]
        for context in contexts:
            encode_many(
                facts, editor.tokenizer, model.start, chat=editor.chat, context=context, limit=model.trunk.context
            )

    with suppress(InputError):  # else one of them: find out which
        check(records)
        return list(range(len(records))), []
    kept, reasons = [], []
    for index, record in enumerate(records):
        try:
            check([record])
            kept.append(index)
        except InputError as problem:
            if not skip_bad:
                raise InputError(f"record {record.id}: {problem}") from None
            reasons.append(f"record {record.id}: {problem}")
    return kept, reasons
