"""Run the named benchmarks, or all of them: `python -m benchmarks solve compose`."""

from __future__ import annotations

import importlib
import sys

SUBJECTS = ("solve", "compose", "targets", "scan")


def main(names: list[str]) -> int:
    if {"-h", "--help"} & {*names}:
        print(f"python -m benchmarks [{' '.join(SUBJECTS)}]: run those named, or all.")
        print("The others are commands of their own, python -m benchmarks.editing and so on; each has --help.")
        return 0
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}, expected one of {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    for name in names or SUBJECTS:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
