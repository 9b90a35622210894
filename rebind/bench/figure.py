"""Time and memory against the length of the sequence, ours and each peer's.

python -m rebind.bench.figure benchmarks/results/scan-cpu.json docs/scan-cpu.png
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from rebind.bench.scan import parse_shape
from rebind.files import write_atomically

COLOURS = {"ours": "#2563eb", "fla": "#dc2626", "transformers": "#d97706", "SDPA": "#059669", "loop": "#7c3aed"}
DASHES = {"gated delta": "-", "delta": (0, (5, 2)), "sum": (0, (1.2, 1.6)), "softmax": "-"}
INK, SOFT, FAINT = "#1f2937", "#6b7280", "#e5e7eb"

Line = list[tuple[int, float]]  # (T, value)


def lines(document: dict[str, Any], column: str) -> tuple[str, dict[tuple[str, str], Line]]:
    """The family of shapes (B, ·, H, D) with most lengths, and a line for each (name, rule) in it.

    Of our own rules those are drawn that a peer has too.
    """
    families: dict[tuple[int, int, int], dict[tuple[str, str], Line]] = {}
    for row in document["rows"]:
        if row[column] is None or row["rule"] not in DASHES:
            continue
        b, t, h, d = parse_shape(row["shape"])
        families.setdefault((b, h, d), {}).setdefault((row["name"], row["rule"]), []).append((t, row[column]))
    if not families:
        return "", {}
    family, found = max(families.items(), key=lambda item: max(map(len, item[1].values())))
    shared = {rule for name, rule in found if name != "ours"} | {"gated delta"}
    b, h, d = family
    where = f"batch {b}, {h} heads of {d}"
    return where, {key: sorted(line) for key, line in found.items() if key[1] in shared or len(found) == 1}


def draw(document: dict[str, Any], *paths: Path) -> bool:
    """Write the figure, in the formats that the paths' suffixes name; False where no shape has two lengths."""
    where, times = lines(document, "both")
    _, memory = lines(document, "peak_mib")
    if not any(len(line) > 1 for line in times.values()):
        return False
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.family": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": "rebind"}):
        figure = Figure(figsize=(9.6, 4.7), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2)
        _panel(panels[0], times, "forward + backward, ms")
        _panel(panels[1], memory, "peak memory with the inputs, MiB")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower right", ncols=-(-len(labels) // 2), frameon=False, fontsize=9,
            labelcolor=INK, handlelength=1.8,
        )  # fmt: skip
        figure.suptitle(
            f"The scan against the length of the sequence  ({where})", x=0.01, ha="left", fontsize=12, color=INK,
            fontweight="bold",
        )  # fmt: skip
        figure.supxlabel(_machine(document), x=0.01, ha="left", fontsize=8, color=SOFT)
        for path in paths:
            data = io.BytesIO()
            form = path.suffix.removeprefix(".") or "png"
            figure.savefig(data, format=form, dpi=130, metadata={"Date": None} if form == "svg" else {"Software": None})
            write_atomically(path, data.getvalue())
    return True


def _panel(axes: Any, found: dict[tuple[str, str], Line], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("T, tokens a sequence", fontsize=9, color=SOFT)
    axes.tick_params(colors=SOFT, labelsize=8, which="both")
    axes.grid(True, which="major", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#a9b1bd")
    lengths = sorted({t for line in found.values() for t, _ in line})
    if not lengths:
        return
    axes.set_xticks(lengths, [_tokens(t) for t in lengths])
    axes.minorticks_off()
    several = {name for name, _ in found if sum(other == name for other, _ in found) > 1}
    for (name, rule), line in found.items():
        mine = name == "ours"
        axes.plot(
            *zip(*line, strict=True), ls=DASHES[rule], marker="o", ms=4.5, lw=2.4 if mine else 1.6,
            color=COLOURS.get(name, INK), zorder=3 if mine else 2,
            label=f"{name}, {rule}" if name in several or mine else name,
        )  # fmt: skip
    _compare(axes, found)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def _compare(axes: Any, found: dict[tuple[str, str], Line]) -> None:
    """How many times ours a peer of the same rule is, at the longest length both have."""
    for (name, rule), line in found.items():
        mine = dict(found.get(("ours", rule), []))
        both = [(t, value) for t, value in line if t in mine]
        if name == "ours" or not both:
            continue
        t, value = both[-1]
        axes.annotate(
            f"{value / mine[t]:.1f}× ours", (t, value), xytext=(7, -3), textcoords="offset points", fontsize=8.5,
            color=COLOURS.get(name, INK), annotation_clip=False,
        )  # fmt: skip


def _tokens(count: int) -> str:
    """A length as it is spoken of.

    >>> _tokens(512), _tokens(65536)
    ('512', '64k')
    """
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _machine(document: dict[str, Any]) -> str:
    here = document["machine"]
    threads = f"{here['threads']} thread{'s' * (here['threads'] != 1)}"
    what = f"{here['processor']}, {threads}" if document["note"].startswith("cpu") else here["gpu"]
    dtype = document["note"].split(";")[0].split(", ")[-1]
    libraries = [
        f"{name} {here[name]}" for name in ("torch", "fla", "transformers") if here.get(name, "none") != "none"
    ]
    return " · ".join([what, dtype, *libraries])


if __name__ == "__main__":
    _paths = [Path(word) for word in sys.argv[1:]]
    if len({path.suffix == ".json" for path in _paths}) < 2:
        sys.exit("expected results and a figure to draw: python -m rebind.bench.figure RESULT.json … FIGURE.png")
    _found = [json.loads(path.read_text(encoding="utf-8")) for path in _paths if path.suffix == ".json"]
    _document = _found[0] | {"rows": [row for one in _found for row in one["rows"]]}
    if not draw(_document, *(path for path in _paths if path.suffix != ".json")):
        sys.exit("there is no shape with two lengths")
