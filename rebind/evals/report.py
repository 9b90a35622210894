"""Write the reports of a run folder: summary.json, table.md and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rebind.evals.figures import draw_run
from rebind.evals.records import Record
from rebind.evals.summary import markdown_report, summarize_run
from rebind.storage import Row, RunFolder

SUMMARY, TABLE = "summary.json", "table.md"


def write(
    folder: RunFolder, records: Sequence[Record], rows: Sequence[Row], drift: Sequence[Row], *, figures: bool = True
) -> dict[str, Any]:
    """Write the summary, the table and, if matplotlib is installed, the figures; return the summary."""
    summary = summarize_run(folder.config, records, rows, drift)
    folder.write(SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    folder.write(TABLE, markdown_report(summary).encode())
    if figures and find_spec("matplotlib"):
        draw_run(folder, summary, rows)
    return summary
