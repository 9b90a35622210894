"""Run the fault campaign: `python -m tests.faults`, or `make faults`."""

from __future__ import annotations

import os

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults.campaign import PARTS, Campaign
from tests.faults.report import details, document, table


def main() -> int:
    """Run the campaign, print what came of it, and return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after this many minutes (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at once (default: one per core)")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    parser.add_argument("--match", default="", help="only faults with this text in their names")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of random faults (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the result into this file")
    options = parser.parse_args()
    parts = tuple(options.only or PARTS)
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where flushing to disk costs nothing
    with tempfile.TemporaryDirectory(prefix="rebind-faults-", dir=place) as folder:
        sizes = (options.seed, 60 * options.minutes, options.jobs, options.match, options.scale)
        campaign = Campaign(Path(folder), *sizes, parts)
        print(f"seed {options.seed}, at most {options.minutes:g} minutes, {options.jobs} at once", flush=True)
        tallies = [campaign.run(part) for part in parts]
    print(f"\n{table(tallies)}\n\n{details(tallies)}")
    if options.json:
        options.json.write_text(document(tallies, options.seed))
    return int(any(tally.findings for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
