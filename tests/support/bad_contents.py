"""Twenty file contents that should not exist; every reader of every kind of file is tested with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BAD: dict[str, bytes] = {
    "empty": b"",
    "nul": bytes(4096),
    "deep list": b"[" * 1000 + b"]" * 1000,
    "deep table": b'{"a":' * 5000,
    "overflow": b'{"version": 1e400, "a": -1e999}',
    "nan": b'{"version": NaN, "heartbeat": NaN}',
    "infinity": b"[Infinity, -Infinity]",
    "5,000 digits": b'{"version": ' + b"9" * 5000 + b"}",
    "utf-16": '{"version": 1}'.encode("utf-16"),
    "no utf-8": b'{"version": "\xff\xfe\x80"}',
    "cut": b'{"version": 1, "name": "a',
    "list": b"[1, 2, 3]",
    "text": b'"a text"',
    "null": b"null",
    "wrong types": b'{"version": "1", "attempts": 3, "entries": {}, "order": 1, "state": [], "files": 7, "name": {}}',
    "nul in a path": b'{"version": 1, "path": "a\\u0000b", "job": "a\\u0000b", "recent": ["a\\u0000b"], "open": []}',
    "half a letter": b'{"version": 1, "path": "\\ud800", "job": "\\udfff", "name": "\\ud800"}',
    "dotted key": b".".join([b"a"] * 30_000) + b" = 1\n",
    "pickle": b"\x80\x04\x95" + os.urandom(64) + b".",
    "control characters": b"\x1b]0;x\x07\x1b[2J\r\n\x00\x08",
}
"""Contents by name, each at most some dozen kilobytes."""


def make_special(path: Path, kind: str) -> bool:
    """Put something other than a regular file at a path; return False if this system does not support it."""
    path.unlink(missing_ok=True)
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            if not hasattr(os, "mkfifo"):
                return False
            os.mkfifo(path)
        case "endless":
            if sys.platform == "win32":
                return False
            path.symlink_to("/dev/zero")
        case "3 GB of nothing":
            with path.open("wb") as file:
                file.truncate(3 << 30)
    return True


SPECIAL = ("folder", "pipe", "endless", "3 GB of nothing")
"""The kinds that `make_special` supports."""
