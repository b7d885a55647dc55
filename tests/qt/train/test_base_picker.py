"""The choice of a base: typed, pasted, chosen from what is on this PC; what is wrong is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.core.session import Session
from app.qt.train.base_picker import BaseDialog, BasePicker, BaseRows
from tests.support import tool_homes


@pytest.fixture
def picker(qtbot: QtBot, session: Session) -> BasePicker:
    made = BasePicker(session)
    qtbot.addWidget(made)
    with qtbot.waitExposed(made):
        made.show()
    made.field.setFocus()
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with three tools in it."""
    place = tmp_path / "home"
    monkeypatch.setenv("IMPASTO_LOOK_IN", str(place))
    tool_homes.a1111(place)
    tool_homes.kohya(place)
    tool_homes.comfy_portable(place, tmp_path / "disk")
    return place


def dialog_of(qtbot: QtBot, picker: BasePicker, session: Session) -> BaseDialog:
    qtbot.mouseClick(picker.button, Qt.MouseButton.LeftButton)
    (dialog,) = picker.findChildren(BaseDialog)
    qtbot.waitUntil(lambda: not session.models.is_searching)
    return dialog


def names(rows: BaseRows) -> list[str]:
    return [row.name for row in rows.rows]


def test_a_path_that_is_typed(qtbot: QtBot, picker: BasePicker, tmp_path: Path) -> None:
    path = tool_homes.sdxl_v(tmp_path / "my vpred.safetensors")
    with qtbot.waitSignal(picker.chosen) as told:
        qtbot.keyClicks(picker.field, f'"{path}"')
    assert told.args == [str(path)]  # without the quotes, and without leaving the field
    assert picker.badge.isVisible()
    assert picker.badge.text() == "SDXL"
    assert "velocity" in picker.state.text()


def test_what_is_wrong_is_said_while_typing(qtbot: QtBot, picker: BasePicker, tmp_path: Path) -> None:
    silent = []
    picker.chosen.connect(silent.append)
    wrong = {
        "http://a.example/b.safetensors": "https://",
        str(tmp_path / "nothing.safetensors"): "does not exist",
        str(tool_homes.lora(tmp_path / "lora.safetensors")): "is a LoRA, not a base",
        str(tool_homes.sd2(tmp_path / "two.safetensors")): "SD 2",
        str(tool_homes.flux(tmp_path / "flux.safetensors")): "Flux",
    }
    for text, words in wrong.items():
        picker.field.clear()
        qtbot.keyClicks(picker.field, text)
        qtbot.waitUntil(lambda words=words: words in picker.state.text())
        assert picker.state.property("role") == "bad"
        assert picker.field.accessibleDescription() == picker.state.text()
        assert not picker.badge.isVisible()
    assert silent == []
    qtbot.keyClick(picker.field, Qt.Key.Key_Return)
    assert silent == [str(tmp_path / "flux.safetensors")]  # what the user insists on stands in the job, with its fault


def test_an_id_is_taken_when_it_is_finished_only(qtbot: QtBot, picker: BasePicker, session: Session) -> None:
    taken = []
    picker.chosen.connect(taken.append)
    qtbot.keyClicks(picker.field, "someone/na")
    qtbot.waitUntil(lambda: picker.verdict.place == "hub")
    qtbot.keyClicks(picker.field, "me")
    qtbot.keyClick(picker.field, Qt.Key.Key_Return)
    assert taken == ["someone/name"]
    qtbot.waitUntil(lambda: session.models.recent == ("someone/name",))
    assert "Downloaded when training starts" in picker.state.text()


def test_a_whole_link_is_taken_as_it_comes(qtbot: QtBot, picker: BasePicker) -> None:
    with qtbot.waitSignal(picker.chosen) as told:
        qtbot.keyClicks(picker.field, "https://a.example/b.safetensors")
    assert told.args == ["https://a.example/b.safetensors"]


def test_showing_a_job_is_no_choice(qtbot: QtBot, picker: BasePicker, session: Session, tmp_path: Path) -> None:
    taken = []
    picker.chosen.connect(taken.append)
    path = tool_homes.sd15(tmp_path / "one.safetensors")
    picker.set_base(str(path))
    qtbot.waitUntil(lambda: picker.badge.text() == "SD 1.5")
    qtbot.keyClick(picker.field, Qt.Key.Key_Return)
    assert taken == []
    picker.set_base("")
    qtbot.waitUntil(lambda: picker.verdict.text == "")
    assert not picker.badge.isVisible()
    assert taken == []


def test_half_typed_when_the_page_goes_away(qtbot: QtBot, picker: BasePicker) -> None:
    qtbot.keyClicks(picker.field, "someone/x")
    with qtbot.waitSignal(picker.chosen) as told:
        picker.hide()
    assert told.args == ["someone/x"]


def test_a_base_from_the_list_by_keys(
    qtbot: QtBot, picker: BasePicker, session: Session, home: Path, tmp_path: Path
) -> None:
    dialog = dialog_of(qtbot, picker, session)
    listed = names(dialog.rows)
    assert listed == ["On this PC", "anything", "Demo", "dreamy", "illustrious é", "nai"]
    assert dialog.state.text().startswith("5 base")
    assert "1 unusable file" in dialog.state.text()
    qtbot.keyClicks(dialog.field, "comfy sdxl")
    assert names(dialog.rows) == ["On this PC", "illustrious é"]
    with qtbot.waitSignal(picker.chosen) as told:
        qtbot.keyClick(dialog.field, Qt.Key.Key_Return)
    assert Path(told.args[0]).name == "illustrious é.safetensors"
    qtbot.waitUntil(lambda: picker.badge.text() == "SDXL")
    qtbot.waitUntil(lambda: len(session.models.recent) == 1)
    again = BaseDialog(session.models)
    qtbot.addWidget(again)
    assert names(again.rows)[:2] == ["Recently used", "illustrious é"]


def test_what_was_used_last_is_told_with_its_family_wherever_it_lies(
    qtbot: QtBot, picker: BasePicker, session: Session, tmp_path: Path
) -> None:
    there, gone = tool_homes.sdxl(tmp_path / "mine é.safetensors"), tmp_path / "gone.safetensors"
    for text in (str(gone), str(there), "someone/used"):
        session.models.add_recent(text)
    dialog = dialog_of(qtbot, picker, session)
    qtbot.waitUntil(lambda: len(session.models.judged) == 3)
    rows = {row.text: row for row in dialog.rows.rows[1:4]}
    assert [rows[str(there)].name, rows[str(there)].badge] == ["mine é", "SDXL"]
    assert rows[str(there)].detail.endswith(str(tmp_path))
    assert rows["someone/used"].detail.startswith("From the Hugging Face Hub.")
    assert rows[str(gone)].kind == "unusable" and "does not exist" in rows[str(gone)].detail


def test_what_cannot_be_used_says_why_when_searched_for(
    qtbot: QtBot, picker: BasePicker, session: Session, home: Path
) -> None:
    dialog = dialog_of(qtbot, picker, session)
    qtbot.keyClicks(dialog.field, "flux1")
    assert names(dialog.rows) == ["Cannot be used as a base", "flux1-dev"]
    assert "Flux" in dialog.rows.rows[1].detail
    assert not dialog.use.isEnabled()
    qtbot.keyClick(dialog.field, Qt.Key.Key_Return)
    assert dialog.isVisible()


def test_the_arrows_pass_over_headings(qtbot: QtBot, picker: BasePicker, session: Session, home: Path) -> None:
    session.models.add_recent("someone/used")
    dialog = dialog_of(qtbot, picker, session)
    assert dialog.list.currentIndex().data() == "someone/used"
    qtbot.keyClick(dialog.field, Qt.Key.Key_Down)
    assert dialog.list.currentIndex().data() == "anything"
    qtbot.keyClick(dialog.field, Qt.Key.Key_Up)
    assert dialog.list.currentIndex().data() == "someone/used"


def test_a_file_and_a_folder_by_the_systems_dialogs(
    qtbot: QtBot, picker: BasePicker, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tool_homes.sd15(tmp_path / "own models" / "mine.safetensors")
    dialog = dialog_of(qtbot, picker, session)
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(path.parent))
    qtbot.mouseClick(dialog.folder, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: "mine" in names(dialog.rows))
    assert session.models.folders == (path.parent,)
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (path.as_posix(), ""))
    with qtbot.waitSignal(picker.chosen) as told:
        qtbot.mouseClick(dialog.file, Qt.MouseButton.LeftButton)
    assert told.args == [str(path)]
    assert not dialog.isVisible()


def test_a_thousand_bases_are_searched_within_a_key(
    qtbot: QtBot, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tool_homes.sd15(tmp_path / "many" / "base 0000.safetensors")
    for number in range(1, 1000):
        (first.parent / f"base {number:04}.safetensors").hardlink_to(first)
    session.models.add_folder(first.parent)
    dialog = BaseDialog(session.models)
    qtbot.addWidget(dialog)
    dialog.show()
    qtbot.waitUntil(lambda: not session.models.is_searching)
    assert len(dialog.rows.rows) == 1002  # with the demo's base and the heading
    qtbot.keyClicks(dialog.field, "0777")
    assert names(dialog.rows) == ["On this PC", "base 0777"]


def test_a_picker_that_is_gone_hears_nothing(qtbot: QtBot, session: Session) -> None:
    picker = BasePicker(session)
    picker.set_base("someone/name")
    picker.deleteLater()
    qtbot.waitUntil(lambda: picker.verdict.text == "" and not session.models.is_searching)
    session.models.search()
    qtbot.waitUntil(lambda: not session.models.is_searching)
