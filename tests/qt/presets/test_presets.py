"""Presets in the window: shared and received, seen before they are kept, searched, changed, thrown away, forecast."""

from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import QMimeData, Qt, QUrl
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog, QLabel, QLineEdit, QPushButton

from app.qt.presets.dialogs import EditDialog, VersionsDialog
from app.qt.presets.page import PresetsPage
from app.qt.train.page import TrainPage
from tests.qt.test_window import drop
from tests.support.artist import shown_page
from tests.unit.config.presets.test_hostile import FILES, GOOD, TINY
from trainer import gpu
from trainer.config.presets import library
from trainer.config.presets.exchange import load_preset
from trainer.config.presets.preset import Preset, dump_preset
from trainer.errors import ImpastoError

DATA = {
    "schema": 2,
    "name": "gouache",
    "author": "Zoë",
    "license": "CC0-1.0",
    "notes": "Soft <b>light</b>.\nSecond line.",
    "base": {"family": "sdxl"},
    "recipe": {"rank": 8, "alpha": 0.1, "learning_rate": 1e-4, "steps": 40},
    "preview": {"image": TINY},
}


def preset(**values: object) -> Preset:
    return Preset.model_validate(DATA | values)


def sent(folder: Path, made: Preset, name: str = "päckchen 1.toml") -> Path:
    path = folder / name
    path.write_text(dump_preset(made), encoding="utf-8", newline="\n")
    return path


def wait(qtbot, until) -> None:
    """Wait as long as a busy machine needs."""
    qtbot.waitUntil(until)


@pytest.fixture
def page(window, qtbot) -> PresetsPage:
    window.show_presets()
    page = shown_page(window, PresetsPage)
    wait(qtbot, lambda: bool(page.list.cards.rows))
    return page


def keep(page, qtbot, made: Preset) -> Path:
    """Put a preset on the shelf, and choose it."""
    path, _ = library.save_preset(made)
    page.session.presets.reload()
    page.choose(path)
    wait(qtbot, lambda: page.chosen is not None and page.chosen.path == path)
    return path


def names(page) -> list[tuple[str, str]]:
    return [(each.preset.name, each.origin) for each in page.list.cards.rows if each.origin != "built-in"]


def clear_notices(window) -> None:
    for bar in tuple(window.notices._bars):
        window.notices._remove(bar)


# From one artist to another.


def send_file(page, folder, monkeypatch):
    target = folder / "für dich.toml"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(target), ""))
    page.commands["presets.save_file"].trigger()
    return target


def send_picture(page, folder, monkeypatch):
    target = folder / "für dich"  # without its ending: the page gives it one
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(target), ""))
    page.commands["presets.save_image"].trigger()
    return target.with_name("für dich.png")


def send_text(page, folder, monkeypatch):
    page.commands["presets.copy"].trigger()


@pytest.mark.parametrize("send", [send_file, send_picture, send_text])
def test_a_preset_goes_from_one_configuration_directory_to_another_byte_for_byte(
    send, window, page, qtbot, tmp_path, monkeypatch
):
    mine = keep(page, qtbot, preset())
    page.commands.refresh_now()
    target = send(page, tmp_path, monkeypatch)
    if target is not None:
        wait(qtbot, target.exists)
    monkeypatch.setenv("IMPASTO_HOME", str(tmp_path / "a friend's"))
    page.session.presets.reload()
    wait(qtbot, lambda: names(page) == [])
    if target is None:
        page.commands["presets.paste"].trigger()
    else:
        drop(window, target)
    wait(qtbot, lambda: page.arriving is not None)
    assert not (tmp_path / "a friend's" / "presets" / "received").exists()  # nothing without consent
    qtbot.mouseClick(page.arriving.keep, Qt.MouseButton.LeftButton)
    wait(qtbot, lambda: names(page) == [("gouache", "received")])
    theirs, expected = page.chosen.path, mine.read_bytes()
    assert theirs.is_relative_to(tmp_path / "a friend's")
    if target is None:
        expected = expected[: expected.index(b"\n[preview]")]
    assert theirs.read_bytes() == expected
    assert load_preset(theirs).recipe == preset().recipe


def test_files_that_no_preset_may_be_are_refused_in_words(window, page, qtbot, tmp_path, per_user_folder):
    assert len(FILES) >= 30
    for number, (kind, (content, expected)) in enumerate(FILES.items()):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        assert drop(window, path)
        wait(qtbot, lambda: bool(window.notices.sentences()))
        [told] = window.notices.sentences()
        assert expected.rstrip("(") in told, kind
        assert page.arriving is None
        clear_notices(window)
    assert list(per_user_folder.rglob("*.toml")) == []


def test_a_job_goes_to_where_jobs_are_and_a_plain_picture_to_the_pictures(window, page, session, qtbot, tmp_path):
    job, picture = tmp_path / "job.toml", tmp_path / "a folder" / "a.png"
    job.write_text('schema = 1\nname = "a"\n[dataset]\n', encoding="utf-8")
    picture.parent.mkdir()
    Image.new("RGB", (64, 48)).save(picture)
    heard = []
    session.navigator.job.connect(heard.append)
    page.open(job)
    wait(qtbot, lambda: heard == [job])
    drop(window, picture)
    wait(qtbot, lambda: len(session.library.images) == 1)
    assert window.pages.currentWidget() is window.images


def test_an_empty_clipboard_is_told_and_a_copied_file_is_taken(window, page, qtbot, tmp_path):
    said = []
    page.message_shown.connect(said.append)
    QGuiApplication.clipboard().clear()
    page.commands["presets.paste"].trigger()
    assert said == ["The clipboard contains no preset."]
    QGuiApplication.clipboard().setText("Hello!")
    page.commands["presets.paste"].trigger()
    wait(qtbot, lambda: any("not valid TOML" in told for told in window.notices.sentences()))
    copied = QMimeData()
    copied.setUrls([QUrl.fromLocalFile(str(sent(tmp_path, preset())))])
    QGuiApplication.clipboard().setMimeData(copied)
    page.commands["presets.paste"].trigger()
    wait(qtbot, lambda: page.arriving is not None)
    page.arriving.reject()
    assert names(page) == []


# Seen before it is kept.


def arrived(window, page, qtbot, path):
    drop(window, path)
    wait(qtbot, lambda: page.arriving is not None)
    return page.arriving


def test_what_a_preset_would_change_is_shown_and_agreed_to(window, page, qtbot, tmp_path):
    keep(page, qtbot, preset())
    other = sent(tmp_path, preset(recipe={"rank": 9, "steps": 40, "schedule": {"kind": "linear"}}, author="Ana"))
    dialog = arrived(window, page, qtbot, other)
    assert [row.texts for row in dialog.table.lines.rows] == [
        ("Author", '"Zoë"', '"Ana"'),
        ("Rank", "8", "9"),
        ("Alpha", "0.1", "not set"),
        ("UNet learning rate", "0.0001", "not set"),
        ("LR scheduler", "not set", "linear"),
    ]
    assert "recipe.rank" in dialog.table.lines.data(dialog.table.lines.index(1, 0), Qt.ItemDataRole.ToolTipRole)
    assert (dialog.keep.text(), dialog.both.isVisible()) == ("Replace mine", True)
    dialog.reject()
    dialog = arrived(window, page, qtbot, other)
    qtbot.mouseClick(dialog.both, Qt.MouseButton.LeftButton)
    wait(qtbot, lambda: ("gouache 2", "received") in names(page))
    dialog = arrived(window, page, qtbot, other)
    qtbot.mouseClick(dialog.keep, Qt.MouseButton.LeftButton)
    wait(qtbot, lambda: page.arriving is None and len(library.versions_of(page.chosen.path)) == 1)
    assert (page.chosen.preset.author, page.chosen.origin) == ("Ana", "yours")
    dialog = arrived(window, page, qtbot, other)
    assert dialog.heading.text() == "You already have this preset with the same settings."
    assert not dialog.keep.isEnabled()
    dialog.reject()


def test_a_name_of_ours_or_a_bad_one_is_not_given(window, page, qtbot, tmp_path):
    dialog = arrived(window, page, qtbot, sent(tmp_path, preset(name="Style")))
    assert dialog.name.text() == "Style 2"
    for name, reason in (("style", "comes with Impasto"), ("a/b", "cannot be a file name")):
        dialog.name.setText(name)
        qtbot.mouseClick(dialog.keep, Qt.MouseButton.LeftButton)
        wait(qtbot, lambda reason=reason: reason in dialog.fault.text())
    dialog.name.setText("")
    assert not dialog.keep.isEnabled()
    dialog.reject()
    assert names(page) == []


def test_texts_of_strangers_are_plain(page, qtbot):
    keep(page, qtbot, preset())
    about = page.details.about
    assert about.notes.text() == DATA["notes"]
    labels = page.details.findChildren(QLabel)
    texts = [label for label in labels if label.text() and label.property("role") != "heading"]
    assert {label.textFormat() for label in texts} <= {Qt.TextFormat.PlainText}
    wait(qtbot, lambda: not about.image.pixmap().isNull())


# At hand.


def test_one_finds_what_one_looks_for(page, qtbot):
    keep(page, qtbot, preset())
    field: QLineEdit = page.field
    field.setText("zoë soft sdxl")
    assert names(page) == [("gouache", "yours")]
    assert len(page.list.cards.rows) == 1
    field.setText("no such thing")
    assert page.list.cards.rows == []
    assert page.no_results.isVisible()
    field.clear()
    page.origin.setCurrentIndex(3)
    assert {each.origin for each in page.list.cards.rows} == {"built-in"}
    page.kind.setCurrentIndex(1)
    assert all(each.preset.fit is not None for each in page.list.cards.rows)
    page.commands.refresh_now()
    assert not page.commands["presets.use"].isEnabled()
    assert page.details.table.lines.rows


def test_use_sets_up_a_new_job_with_the_recipe(window, page, session, qtbot):
    """With that of the family that was chosen: the name alone would not tell."""
    keep(page, qtbot, preset())
    keep(page, qtbot, preset(base={"family": "sd15"}, recipe={"rank": 9}))
    page.commands.refresh_now()
    page.details.findChild(QPushButton).click()
    train = shown_page(window, TrainPage)
    wait(qtbot, lambda: train.draft is not None and train.draft.get("recipe.rank") == 9)
    assert train.draft.get("preset") == "sd15/gouache"


def test_edited_it_keeps_what_it_was_and_goes_back(page, qtbot):
    path = keep(page, qtbot, preset())
    content = path.read_bytes()
    page.edit()
    dialog = page.findChild(EditDialog)
    dialog.name.setText("a/b")
    dialog.buttons.accepted.emit()
    wait(qtbot, lambda: "cannot be a file name" in dialog.fault.text())
    dialog.name.setText("watercolour")
    dialog.license.setText("CC-BY-4.0")
    dialog.words.setText("wtc, , soft ")
    dialog.show_image(None)
    dialog.buttons.accepted.emit()
    wait(qtbot, lambda: page.chosen.preset.name == "watercolour")
    changed = load_preset(path)
    assert (changed.license, changed.trigger_words, changed.preview) == ("CC-BY-4.0", ("wtc", "soft"), None)
    assert changed.recipe == preset().recipe
    page.versions()
    versions = page.findChild(VersionsDialog)
    wait(qtbot, lambda: versions.back.isEnabled())
    assert ("Name", '"watercolour"', '"gouache"') in [row.texts for row in versions.table.lines.rows]
    versions.back.click()
    wait(qtbot, lambda: page.chosen.preset.name == "gouache")
    assert path.read_bytes() == content
    assert len(library.versions_of(path)) == 2


def test_texts_that_differ_where_they_are_cut_can_be_read_whole(page, qtbot):
    path = keep(page, qtbot, preset())
    notes = ["Made with sixty pictures of gouache, by day", "Made with sixty pictures of gouache, by night"]
    for text in notes:
        page.edit()
        dialog = next(each for each in page.findChildren(EditDialog) if each.isVisible())
        dialog.notes.setPlainText(text)
        dialog.buttons.accepted.emit()
        wait(qtbot, lambda text=text: load_preset(path).notes == text and page.chosen.preset.notes == text)
    page.versions()
    versions = page.findChild(VersionsDialog)
    wait(qtbot, lambda: versions.back.isEnabled())
    lines = versions.table.lines
    row = next(row for row, line in enumerate(lines.rows) if line.texts[0] == "Notes")
    tips = [lines.data(lines.index(row, column), Qt.ItemDataRole.ToolTipRole) for column in (1, 2)]
    assert [text in tip for text, tip in zip(reversed(notes), tips, strict=True)] == [True, True]


def test_built_in_ones_cannot_be_changed_but_copied(page, qtbot):
    page.field.setText("likeness sdxl")
    page.commands.refresh_now()
    assert not any(page.commands[f"presets.{name}"].isEnabled() for name in ("edit", "versions", "delete"))
    page.commands["presets.duplicate"].trigger()
    wait(qtbot, lambda: names(page) == [("likeness 2", "yours")])
    assert page.chosen.preset.recipe == library.find_preset("likeness", "sdxl").preset.recipe


def test_a_deleted_one_comes_back(window, page, qtbot, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # where Linux has its trash
    path = keep(page, qtbot, preset())
    content = path.read_bytes()
    page.commands.refresh_now()
    page.commands["presets.delete"].trigger()
    wait(qtbot, lambda: names(page) == [])
    assert not path.exists()
    [bar] = window.notices._bars
    bar.findChild(QPushButton).click()
    wait(qtbot, lambda: names(page) == [("gouache", "yours")])
    assert path.read_bytes() == content


def test_a_broken_file_is_named_and_hides_no_other(window, page, qtbot):
    keep(page, qtbot, preset())
    (library.presets_folder() / "old.sdxl.toml").write_text(GOOD + "rnak = 1\n", encoding="utf-8")
    page.session.presets.reload()
    wait(qtbot, lambda: any("Could not read old.sdxl.toml" in told for told in window.notices.sentences()))
    assert names(page) == [("gouache", "yours")]
    for bar in tuple(window.notices._bars):
        bar.closing.click()
    read = []
    page.session.presets.changed.connect(read.append)
    page.session.presets.reload()
    wait(qtbot, lambda: bool(read))
    assert window.notices.sentences() == []  # it was told
    (library.presets_folder() / "old.sdxl.toml").write_text("?", encoding="utf-8")
    page.session.presets.reload()
    wait(qtbot, lambda: len(window.notices.sentences()) == 1)  # and now it is broken in another way


# What it costs.


def has_card() -> bool:
    try:
        return bool(gpu.list_gpus())
    except ImpastoError:
        return False


def test_cards_say_what_they_cost_as_the_planner_finds_it(window, page, qtbot, tmp_path):
    """A real planner is asked for the chosen card first; on the friend's smaller card it says how it is fitted."""
    outlooks = page.session.presets.cost_estimates
    page.field.setText("style sdxl")
    words = page.details.outlook.words
    wait(qtbot, lambda: "Estimating" not in words.text())
    if not has_card():
        assert words.text().startswith("About ") and "on this PC's CPU" in words.text()
        assert words.text().endswith("No NVIDIA GPU was found, so training uses the CPU.")
        assert page.list.cards.lines(page.chosen)[3].endswith(" on the CPU")
    cards = page.details.outlook.gpus
    cards.setCurrentIndex(cards.findData("8GB"))
    cards.activated.emit(cards.currentIndex())
    wait(qtbot, lambda: "RTX 4060 8GB" in words.text())
    assert "Fit: bf16 base streamed from main memory" in words.text()
    card = page.list.cards.lines(page.chosen)
    assert card[3].startswith("About ")
    assert card[3].endswith("6.3 of 7.3 GiB")  # nothing about its precision: the base is not quantized
    dialog = arrived(window, page, qtbot, sent(tmp_path, preset(recipe=page.chosen.preset.recipe)))
    wait(qtbot, lambda: "Fit: bf16 base streamed from main memory" in dialog.outlook.words.text())
    dialog.reject()
    process = outlooks._served._process
    window.show_images()
    assert process.wait(60) != 0  # nobody looks: the planner ends
