"""Looks at many pictures at once to learn what they are, and remembers it while their files do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

from trainer.dataset.decoders import Decoders
from trainer.dataset.inspection import Inspection, file_state
from trainer.dataset.memory import PictureFacts, PictureMemory, picture_memory
from trainer.dataset.pixels import check_megapixels
from trainer.errors import DatasetError
from trainer.host import usable_cores

Progress = Callable[[int, int], None]
"""Called with the number of files checked and the number of all."""

AT_ONCE = min(4, usable_cores())
"""Pictures looked at at once; more would gain little and take more memory."""


def inspect_pictures(
    paths: Iterable[Path], max_megapixels: float, progress: Progress | None = None, decoders: Decoders | None = None
) -> dict[Path, Inspection]:
    """Return for each file what it is, or why it cannot be used; every picture is decoded to its end.

    A file whose size and time are those of an earlier check is not opened again. Whoever asks again and again gives
    the `decoders`, so that their processes need not start each time.
    """
    paths = list(dict.fromkeys(paths))
    with picture_memory() as memory, nullcontext(decoders) if decoders else Decoders(AT_ONCE) as decoders:
        found = {path: facts for path in paths if (facts := _recall(path, max_megapixels, memory))}
        unknown = [path for path in paths if path not in found]
        for path, state, facts in decoders.inspect(unknown, max_megapixels):
            found[path] = facts
            if state and isinstance(facts, PictureFacts):
                memory.keep(path, state, facts)
            if progress:
                progress(len(found), len(paths))
    return found


def _recall(path: Path, max_megapixels: float, memory: PictureMemory) -> Inspection | None:
    try:
        facts = memory.recall(path, file_state(path))
        if facts:
            check_megapixels(path, facts.width, facts.height, max_megapixels)
    except DatasetError as error:
        return error
    return facts
