"""Tells whether a PNG holds all the pixels that its header promises; Pillow paints what is missing black."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.protocol.reading import open_file

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# Adam7: the first column and row of each pass, and the steps between its columns and rows (PNG, 3rd edition, 8.1).
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_BLOCK = 1 << 20


def is_whole(path: Path) -> bool:
    """Return whether the compressed data of a PNG unpack to at least the bytes of all its rows.

    Nothing is kept: memory stays at a megabyte, whatever the header says. Raises OSError, zlib.error and struct.error.
    """
    with open_file(path, "image") as file:
        file.seek(16)
        width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", file.read(13))
        missing = _row_bytes(width, height, depth * _CHANNELS[colour], bool(interlaced))
        file.seek(8)
        unpacker = zlib.decompressobj()
        for packed in _data_chunks(file):
            while packed and missing > 0:
                missing -= len(unpacker.decompress(packed, _BLOCK))
                packed = unpacker.unconsumed_tail
        return missing <= 0


def _row_bytes(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Return how many bytes the rows have, each with its filter byte in front."""
    total = 0
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        total += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    return total


def _data_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the picture's data, skipping the other chunks, up to the end of the file."""
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IDAT":
            yield file.read(length)
        elif kind == b"IEND":
            return
        else:
            file.seek(length, 1)
        file.seek(4, 1)
