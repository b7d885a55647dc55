"""Collect the app's translatable texts and compile the translations: `python -m app.i18n [CODE ...]`.

Runs Qt's lupdate and lrelease from PySide6-Essentials. lupdate updates every impasto_CODE.ts, which translators edit in
Qt Linguist, and creates the file for each CODE given. lrelease compiles them to impasto_CODE.qm, which the app loads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import PySide6
from PySide6.QtCore import QLocale

FOLDER = Path(__file__).resolve().parent
APP = FOLDER.parent


def main(words: Sequence[str] | None = None) -> None:
    """Update and compile all existing translations; add one for each new language code in `words`."""
    parser = argparse.ArgumentParser("python -m app.i18n", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument(
        "codes", metavar="CODE", nargs="*", type=language, help="code of a language to add, such as de or pt_BR"
    )
    codes = parser.parse_args(words).codes
    for target in sorted({FOLDER / f"impasto_{code}.ts" for code in codes} | set(FOLDER.glob("impasto_*.ts"))):
        collect(target)
        run("lrelease", str(target), "-qm", str(target.with_suffix(".qm")))


def language(code: str) -> str:
    """Return the language code if it is spelled as in Qt; raise ArgumentTypeError if it is not."""
    locale = QLocale(code)
    known = locale.name(), QLocale.languageToCode(locale.language())
    if code not in known or locale.language() == QLocale.Language.C:
        raise argparse.ArgumentTypeError(f"{code!r} is not a language code; write it like de or pt_BR")
    return code


def collect(target: Path) -> None:
    """Update a .ts file with all translatable texts in the app's source code."""
    english = target.stem == "impasto_en"
    # English needs only the texts with plural forms.
    only = ["-pluralonly", "-source-language", "en", "-target-language", "en"] if english else []
    sources = sorted(str(path) for path in APP.rglob("*.py"))
    only += ["-tr-function-alias", "QT_TRANSLATE_NOOP+=_NOOP"]
    run("lupdate", *only, "-locations", "none", "-no-obsolete", *sources, "-ts", str(target))
    if english:
        fill_english(target)


def fill_english(target: Path) -> None:
    """Fill in singular and plural for texts like "%n image(s)"; a text without "(s)" is used for both."""
    tree = ElementTree.parse(target)
    for message in tree.iter("message"):
        source, translation = message.findtext("source", ""), message.find("translation")
        if translation is None:
            continue
        for form, ending in zip(translation.findall("numerusform"), ("", "s"), strict=True):
            form.text = source.replace("(s)", ending)
        translation.attrib.pop("type", None)
    body = ElementTree.tostring(tree.getroot(), encoding="unicode")
    target.write_text(
        f'<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE TS>\n{body}\n', encoding="utf-8", newline="\n"
    )


def run(tool: str, *arguments: str) -> None:
    """Run one of Qt's tools; raise CalledProcessError if it fails."""
    name = f"{tool}.exe" if sys.platform == "win32" else tool
    subprocess.run([str(Path(PySide6.__file__).parent / name), *arguments], check=True)


if __name__ == "__main__":
    main()
