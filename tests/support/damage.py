"""Files as a failing disk or a torn write leaves them."""

from __future__ import annotations

import random


def damaged(sound: bytes, chance: random.Random) -> bytes:
    """Return the bytes truncated, or with a few of them changed."""
    if chance.random() < 0.3:
        return sound[: chance.randrange(len(sound))]
    changed = bytearray(sound)
    for _ in range(chance.randrange(1, 8)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)
