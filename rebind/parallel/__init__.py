"""Work that several processes share: those that `torchrun` or `accelerate launch` started for one command.

- `processes`: join them; which of them writes; share items, gather results, sum tensors
- `messages`: values as bytes, in JSON and safetensors; nothing is unpickled
- `units`: units of work that processes finish in any order, stored in their order

Every process runs the same program. Where there is a lot of work, each does its share of it and all get every result;
the rest they compute alike. One of them, the writer, writes files and prints. With a single process, which is all
there is unless `join_processes` was called, everything here costs nothing.
"""

from __future__ import annotations

from rebind.parallel.processes import (
    alone,
    from_writer,
    gather,
    is_writer,
    join_processes,
    local_device,
    ranks,
    share,
    should_report,
    sum_tensors,
    unite,
)
from rebind.parallel.units import OrderedUnits, open_run_folder

__all__ = [
    "OrderedUnits",
    "alone",
    "from_writer",
    "gather",
    "is_writer",
    "join_processes",
    "local_device",
    "open_run_folder",
    "ranks",
    "share",
    "should_report",
    "sum_tensors",
    "unite",
]
