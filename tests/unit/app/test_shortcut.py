"""The desktop entry: what is written is what desktops read."""

import configparser
import sys
from pathlib import Path

import pytest

from app import shortcut
from trainer.errors import ImpastoError


def read_exec(text: str) -> list[str]:
    """The program and its arguments, unquoted by the Desktop Entry Specification: strings first, then Exec."""
    entry = configparser.RawConfigParser(strict=True)
    entry.optionxform = str
    entry.read_string(text)
    value = entry["Desktop Entry"]["Exec"].replace("\\\\", "\\")
    quoted, _, rest = value[1:].partition('" ')
    for character in '"`$\\':
        quoted = quoted.replace("\\" + character, character) if character != "\\" else quoted.replace("\\\\", "\\")
    return [quoted.replace("%%", "%"), *rest.split()]


@pytest.mark.parametrize(
    "python", ["/usr/bin/python3", "/home/Jürgen Groß/100 % mine/bin/python", '/odd/$HOME`"/python', "/back\\slash/py"]
)
def test_any_path_comes_through_the_quoting(python):
    assert read_exec(shortcut.desktop_entry(python, Path("/x"))) == [python, "-m", "app", "%F"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="menus of Linux desktops")
def test_the_entry_lands_in_the_users_menu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "Daten für mich"))
    assert shortcut.main() == 0
    target = tmp_path / "Daten für mich" / "applications" / "impasto.desktop"
    assert read_exec(target.read_text(encoding="utf-8"))[0] == sys.executable
    assert str(target) in capsys.readouterr().out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="menus of Linux desktops")
def test_a_place_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(ImpastoError, match=r"Could not write .*impasto\.desktop"):
        shortcut.menu_entry()
