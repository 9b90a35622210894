"""The fault campaign: kills, full disks, crowds, tampering and bad input, against everything that rebind stores.

    python -m tests.faults              the whole campaign, at most 20 minutes (`make faults`)
    pytest tests/faults                 a short version of each part, for CI

- `children`: run a function in a forked process that dies, or runs out of disk, at a chosen moment
- `operations`: what is under fire, what a reader sees of it, and how to run it again
- `kills`: processes that die, and disks that fill or fail
- `crowds`: several processes on one ledger, export or cache
- `tampering`: damaged and forged files; `artifacts` has what is damaged
- `inputs`: bad values for every option of every command; `values`: for every setting in Python
- `report`: counts what went wrong, and prints how to repeat it
"""
