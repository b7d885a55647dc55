"""Writes presets: only what is stated, each key explained, the picture last."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.presets.preset import Preset
from trainer.config.write import stated_lines

_HEADING = """\
# A preset for Impasto: python -m trainer presets add THIS_FILE
"""


def dump_preset(preset: Preset) -> str:
    """The preset as TOML that ``parse_preset`` reads as an equal one, with the same keys stated."""
    without_picture = preset.changed(preview=None)
    lines = [*stated_lines(without_picture, ""), *_picture_lines(preset)]
    return _HEADING + "\n".join(lines) + "\n"


def _picture_lines(preset: Preset) -> Iterator[str]:
    """The picture over many lines: one of 50,000 characters would bring most editors to their knees."""
    if preset.preview is not None:
        compact = "".join(preset.preview.picture.split())
        yield from ("", "[preview]", "# A small picture that shows the result, in base64.", 'picture = """')
        yield from (compact[start : start + 100] for start in range(0, len(compact), 100))
        yield '"""'
