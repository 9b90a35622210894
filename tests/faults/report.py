"""What a campaign counts, and what it prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

VERDICTS = ("lost", "corrupted", "stuck", "unclear", "traceback", "silent")
HEADINGS = ("lost", "corrupted", "stuck", "unclear", "tracebacks", "silent wrong results")


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong."""

    part: str  # of the campaign
    fault: str  # the name of the fault, which repeats it
    verdict: str  # one of VERDICTS
    details: str

    def described(self, seed: int) -> str:
        """Return what went wrong, and the command that repeats it."""
        command = f"python -m tests.faults --seed {seed} --only {self.part} --match {self.fault!r}"
        return f"{self.verdict}: {self.fault}\n  {self.details}\n  repeat: {command}"


@dataclass
class Tally:
    """One part of the campaign: how many faults were tried, what came of them, and what went wrong."""

    part: str
    tried: int = 0
    skipped: int = 0  # because time ran out
    ends: Counter[str] = field(default_factory=Counter)  # how the faults ended: "killed", "refused", "unharmed", ...
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, fault: str, end: str, problems: Iterable[tuple[str, str]] = ()) -> list[Finding]:
        """Count a fault: how it ended, and (verdict, details) for each thing that went wrong, which are returned."""
        self.tried += 1
        self.ends[end] += 1
        findings = [Finding(self.part, fault, verdict, details) for verdict, details in problems]
        self.findings += findings
        return findings

    def count(self, verdict: str) -> int:
        """Return the number of faults with this verdict."""
        return len({one.fault for one in self.findings if one.verdict == verdict})


def table(tallies: Iterable[Tally]) -> str:
    """Return the campaign as a table in Markdown."""
    lines = [f"| part | tried | {' | '.join(HEADINGS)} | seconds |", "| --- |" + " ---: |" * (len(HEADINGS) + 2)]
    rows = [(one.part, one.tried, *(one.count(verdict) for verdict in VERDICTS), round(one.seconds)) for one in tallies]
    totals = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
    for row in [*rows, ("all", *totals)]:
        lines.append("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) + " |")
    return "\n".join(lines)


def details(tallies: Iterable[Tally]) -> str:
    """Return how the faults ended."""
    lines = []
    for one in tallies:
        ends = ", ".join(f"{count:,} {end}" for end, count in sorted(one.ends.items()))
        lines.append(f"{one.part}: {ends}" + (f"; {one.skipped:,} skipped for lack of time" if one.skipped else ""))
    return "\n".join(lines)


def document(tallies: Iterable[Tally], seed: int) -> str:
    """Return the campaign as JSON."""
    parts = [
        {**vars(one), "ends": dict(one.ends), "findings": [asdict(row) for row in one.findings]} for one in tallies
    ]
    return json.dumps({"seed": seed, "parts": parts}, indent=1)
