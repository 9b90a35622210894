"""Read records from a file, a dataset of the Hub, or Python objects.

records = read_records("counterfact.json", limit=1000, skip_bad=True)
records = read_records("hf:azhx/counterfact:test")
records = bundled_records()                                # sixty facts that come with the package
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rebind.edit.facts.readers import raw_records, record_error
from rebind.errors import InputError
from rebind.evals.formats import parse_record
from rebind.evals.records import Record, Records

BUNDLED = Path(__file__).parent / "data" / "facts.jsonl"
HUB = "hf:"


def bundled_records(limit: int | None = None) -> Records:
    """Return the sixty facts over ten relations that come with the package."""
    return replace(read_records(BUNDLED, limit=limit), name="bundled")


def read_records(
    source: str | Path | Record | Mapping[str, object] | Iterable[object],
    *,
    limit: int | None = None,
    skip_bad: bool = False,
) -> Records:
    """Read the records of a file, of a Hub dataset ("hf:name" or "hf:name:split"), or of an iterable.

    A record that cannot be read raises an error that names it; with `skip_bad` it is skipped and the reason stored.
    `limit` counts the records that are returned.
    """
    if limit is not None and limit < 1:
        raise InputError(f"The limit is {limit}", expected="1 or more", code="limit_too_small")
    records: list[Record] = []
    skipped: list[str] = []
    skipped_at: list[int] = []
    for where, raw in _raw_records(source):
        if limit is not None and len(records) >= limit:
            break
        try:
            records.append(parse_record(raw, str(len(records) + len(skipped))))
        except (InputError, RecursionError) as problem:
            reason = str(record_error(problem, where, raw))
            if not skip_bad:
                raise InputError(
                    reason,
                    advice="Correct the record, or use {skip_bad}",
                    code="bad_record",
                    settings={"skip_bad": True},
                ) from None
            skipped.append(reason)
            skipped_at.append(len(records))
    if not records:
        why = f" ({len(skipped)} skipped; the first: {skipped[0]})" if skipped else ""
        raise InputError(f"{_name(source)} holds no records{why}", expected="at least one", code="no_records")
    return Records(tuple(records), _name(source), tuple(skipped), tuple(skipped_at))


def _name(source: object) -> str:
    if isinstance(source, (str, Path)):
        return str(source) if str(source).startswith(HUB) else Path(source).name
    return "records"


def _raw_records(source: Any) -> Iterator[tuple[str, Any]]:
    """Yield each record as it is in the source, with a name for error messages."""
    if isinstance(source, str) and source.startswith(HUB):
        return raw_records(_hub_dataset(source))
    if isinstance(source, (str, Path)) and not Path(source).exists():
        raise InputError(
            f"There is no file {source}",
            advice="Check the name; a dataset of the Hub is written hf:name:split",
            code="file_not_found",
        )
    return raw_records([source] if isinstance(source, Record) else source)


def _hub_dataset(name: str) -> Iterable[Any]:
    repository, _, split = name.removeprefix(HUB).partition(":")
    if not repository:
        raise InputError(f"The dataset is {name!r}", expected="a name as in 'hf:azhx/counterfact:test'", code="no_name")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]  # an optional dependency
    except ImportError:
        raise InputError(
            f"{name} is a dataset of the Hub, which needs the package datasets",
            advice="Run pip install datasets, or pass a file",
            code="package_missing",
        ) from None
    try:
        return list(datasets.load_dataset(repository, split=split or "train"))
    except Exception as problem:  # missing, gated or offline: each raises its own exception
        line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise InputError(
            f"Dataset {repository!r}, split {split or 'train'!r}, could not be loaded ({line})",
            advice="Check the name and the split, connect to the network, or pass a file",
            code="dataset_unavailable",
        ) from None
