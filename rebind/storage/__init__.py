"""Everything that rebind writes to disk goes through this package.

- `atomic`: files and folders that appear complete or not at all; files that are no symbolic links
- `exports`: folders that a later export may replace
- `jsonl`: rows that survive a kill
- `lock`: one writer at a time
- `run_folder`: a folder that one run owns and can resume
- `seals`: digests inside of files, so that damage is noticed
- `directories`: the user's cache and data folders
- `problems`: what went wrong, as StorageError or InputError

No function here follows a symbolic link: one in the place of a file to write is replaced (`write_file`) or refused, one
in the place of a file to read is refused, and `path_inside` refuses links to folders below a ledger, an export, a cache
or a run folder. These folders themselves may be links.
"""

from __future__ import annotations

from rebind.storage.atomic import (
    check_writable,
    create_folder,
    make_folders,
    open_to_read,
    path_inside,
    read_file,
    read_json_object,
    remove_file,
    remove_folder,
    remove_temporaries,
    without_nan,
    write_file,
    write_json,
)
from rebind.storage.directories import cache_dir, data_dir, ledgers_dir
from rebind.storage.exports import add_to_export, check_replaceable, replace_folder
from rebind.storage.jsonl import JsonLines, Row, append_at
from rebind.storage.lock import lock
from rebind.storage.problems import damage_errors, storage_errors
from rebind.storage.run_folder import RunFolder, RunKind, flatten
from rebind.storage.seals import check_json, open_tensors, read_sealed_json, seal_json, seal_tensors

__all__ = [
    "JsonLines",
    "Row",
    "RunFolder",
    "RunKind",
    "add_to_export",
    "append_at",
    "cache_dir",
    "check_json",
    "check_replaceable",
    "check_writable",
    "create_folder",
    "damage_errors",
    "data_dir",
    "flatten",
    "ledgers_dir",
    "lock",
    "make_folders",
    "open_tensors",
    "open_to_read",
    "path_inside",
    "read_file",
    "read_json_object",
    "read_sealed_json",
    "remove_file",
    "remove_folder",
    "remove_temporaries",
    "replace_folder",
    "seal_json",
    "seal_tensors",
    "storage_errors",
    "without_nan",
    "write_file",
    "write_json",
]
