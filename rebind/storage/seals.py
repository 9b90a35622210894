"""Digests inside of files, so that damage to what was stored is noticed when it is read again.

A seal is no signature: whoever forges a file can seal it. It tells bits that flipped, parts that are missing and files
that were exchanged. Ledgers have a chain of digests of their own (`rebind.edit.ledger.log`).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rebind.storage.atomic import open_to_read, read_json_object

SEAL = "sha256"  # the name of the digest in the metadata of tensors, and in JSON objects
METADATA = "__metadata__"  # where safetensors keeps it
LARGEST_HEADER = 100_000_000  # bytes, as in safetensors
LINE = re.compile(rb'(.*?)(?:, )?"crc": "([0-9a-f]{8})"\}', re.DOTALL)


def seal_tensors(data: bytes) -> bytes:
    """Return the content of a safetensors file with a digest of everything in it."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    digest = hashlib.sha256(_canonical(header))
    digest.update(body)
    header[METADATA] = {**header.get(METADATA, {}), SEAL: digest.hexdigest()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, body])


@contextmanager
def open_tensors(path: str | Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a sealed safetensors file with `safe_open`, and return it with its metadata.

    Raises:
        ValueError: it was altered, or another process has just replaced it.
        OSError: it is absent or a symbolic link.
    """
    metadata = check_tensors(path)
    seal = metadata.pop(SEAL)
    try:
        opened = safe_open(str(path), framework="pt")
    except (RuntimeError, SafetensorError) as problem:
        raise ValueError(str(problem)) from None  # it was there a moment ago
    with opened as file:
        if file.metadata()[SEAL] != seal:
            raise ValueError("it was replaced while it was read")
        yield file, metadata


def check_tensors(path: str | Path) -> dict[str, str]:
    """Return the metadata of a sealed safetensors file; raise ValueError if it was altered, OSError if it is absent."""
    with open_to_read(path) as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        if size > LARGEST_HEADER:
            raise ValueError("it is no safetensors file")
        try:
            header = json.loads(file.read(size))
            metadata = dict(header[METADATA])
            stated = header[METADATA].pop(SEAL)
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError):
            raise ValueError("it has no digest") from None
        digest = hashlib.sha256(_canonical(header))
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != stated:
        raise ValueError("its digest does not match")
    return {str(name): str(value) for name, value in metadata.items()}


def seal_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a digest of its other fields."""
    plain = json.loads(json.dumps(value))  # as it will be read: lists for tuples, texts for keys
    return {**plain, SEAL: hashlib.sha256(_canonical(plain)).hexdigest()}


def check_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sealed JSON object without its digest; raise ValueError if it was altered."""
    fields = {name: field for name, field in value.items() if name != SEAL}
    if hashlib.sha256(_canonical(fields)).hexdigest() != value.get(SEAL):
        raise ValueError("its digest does not match")
    return fields


def read_sealed_json(path: str | Path) -> dict[str, Any] | None:
    """Return the JSON object in a file without its digest; None if there is none, or one that was altered."""
    try:
        return check_json(read_json_object(path) or {})
    except ValueError:
        return None


def seal_line(line: str, previous: int = 0) -> str:
    """Return a JSON object on one line with a checksum of it and of the lines before it as its last field.

    >>> seal_line('{"step": 1}'), seal_line("{}")
    ('{"step": 1, "crc": "3a87913d"}', '{"crc": "a3a6bf43"}')
    """
    comma = ", " if line != "{}" else ""
    return f'{line[:-1]}{comma}"crc": "{zlib.crc32(line.encode(), previous):08x}"}}'


def check_line(line: bytes, previous: int = 0) -> tuple[bytes, int]:
    """Return a sealed line without its checksum, and the checksum; raise ValueError if it was altered or misplaced."""
    match = LINE.fullmatch(line)
    if match is None:
        raise ValueError("it has no checksum")
    content, stated = match[1] + b"}", int(match[2], 16)
    if zlib.crc32(content, previous) != stated:
        raise ValueError("its checksum does not match")
    return content, stated


def checksum_at_end(tail: bytes) -> int:
    """Return the checksum of the last line, from the end of a file; 0 if that is not a sealed line.

    >>> checksum_at_end(b'{"crc": "a3a6bf43"}\\n') == 0xA3A6BF43, checksum_at_end(b"")
    (True, 0)
    """
    match = re.search(rb'"crc": "([0-9a-f]{8})"\}\n\Z', tail)
    return int(match[1], 16) if match else 0


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
