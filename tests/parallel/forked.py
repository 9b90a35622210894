"""Run functions in several gloo processes, forked from one process that has imported everything.

Importing takes longer than all that the processes do, so it happens once.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_jobs(jobs: dict[str, int], folder: Path, timeout: float = 900) -> dict[str, list[int]]:
    """Run functions "module.function" of this folder, each in so many processes; return their exit codes.

    Each has a folder with the function's name.
    """
    words = [f"{name}:{count}" for name, count in jobs.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "from tests.parallel.forked import main; main()", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-4_000:]
    names = [name.partition(".")[2] for name in jobs]
    return {name: list(map(int, (folder / name / "codes").read_text().split())) for name in names}


def main() -> None:
    """Run the jobs of the command line, one after another."""
    import torch

    torch.set_num_threads(1)
    folder, *words = sys.argv[1:]
    for word in words:
        name, count = word.split(":")
        module, _, job = name.partition(".")
        place = Path(folder) / job
        place.mkdir(parents=True, exist_ok=True)
        codes = fork(getattr(importlib.import_module(f"tests.parallel.{module}"), job), int(count), place)
        (place / "codes").write_text(" ".join(map(str, codes)))


def fork(function: Callable[[Path], object], count: int, folder: Path) -> list[int]:
    """Run a function in `count` processes; return their exit codes, negative for a signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.stdout.flush()
    sys.stderr.flush()
    children = [_start(function, rank, folder) for rank in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _start(function: Callable[[Path], object], rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "REBIND_CACHE": str(folder / "cache")}
    for stream in (1, 2):
        os.dup2(os.open(folder / f"{'out' if stream == 1 else 'err'}-{rank}", os.O_WRONLY | os.O_CREAT), stream)
    try:
        result = function(folder)
        code = result if isinstance(result, int) else 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0
