"""Everything that rebind writes to disk goes through this package.

- `atomic`: files and folders that appear complete or not at all
- `exports`: folders that a later export may replace
- `jsonl`: rows that survive a kill
- `lock`: one writer at a time
- `run_folder`: a folder that one run owns and can resume
- `directories`: the user's cache and data folders
- `problems`: what went wrong, as StorageError

No function here writes through a symbolic link: a link in the place of a file is replaced (`write_file`) or refused,
and `path_inside` refuses links to folders below a ledger, an export or a run folder.
"""

from __future__ import annotations

from rebind.storage.atomic import (
    check_writable,
    create_folder,
    make_folders,
    path_inside,
    read_json_object,
    remove_temporaries,
    write_file,
    write_json,
)
from rebind.storage.directories import cache_dir, data_dir, ledgers_dir
from rebind.storage.exports import add_to_export, check_replaceable, replace_folder
from rebind.storage.jsonl import JsonLines, Row, append_at
from rebind.storage.lock import lock
from rebind.storage.problems import storage_errors
from rebind.storage.run_folder import RunFolder, RunKind, flatten

__all__ = [
    "JsonLines",
    "Row",
    "RunFolder",
    "RunKind",
    "add_to_export",
    "append_at",
    "cache_dir",
    "check_replaceable",
    "check_writable",
    "create_folder",
    "data_dir",
    "flatten",
    "ledgers_dir",
    "lock",
    "make_folders",
    "path_inside",
    "read_json_object",
    "remove_temporaries",
    "replace_folder",
    "storage_errors",
    "write_file",
    "write_json",
]
