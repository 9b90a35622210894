"""Programs in fresh interpreters, for what depends on what a process has imported or switched before.

Starting a process with torch or transformers takes seconds, nearly all of them spent on imports. So one process imports
what its programs have in common, and forks for each of them: none sees what another did.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

FORKS = """
import json, os, sys, traceback
imports, programs = json.load(sys.stdin)
names = {}
exec(imports, names)
for name, program in programs.items():
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        try:
            exec(program, names)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


def failures(imports: str, programs: Mapping[str, str], **options: Any) -> list[str]:
    """Run every program in a process of its own, after `imports`; return the names of those that failed.

    Their tracebacks are on standard error. `options` are those of `subprocess.run`.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([imports, dict(programs)]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
        **options,
    )
    return ended.stdout.splitlines()
