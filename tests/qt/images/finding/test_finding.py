"""The filter box and the tag panel through clicks and keys, over real pictures' records and a real session."""

import html
import re
from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, QPoint, Qt
from PySide6.QtGui import QAccessible, QColor
from PySide6.QtTest import QAbstractItemModelTester
from PySide6.QtWidgets import QDialog, QInputDialog, QVBoxLayout, QWidget

from app.core.library import Folder
from app.core.query.filtering import SavedFilter
from app.core.tags.index import TagCount
from app.qt.actions.commands import Commands
from app.qt.images.finding.filter_box import FilterBox, HelpDialog, SaveDialog
from app.qt.images.finding.suggestions import ProposalModel
from app.qt.images.finding.tag_panel import TagModel, TagPanel, sort_tags
from app.qt.theme import Theme, colors

CAPTIONS = ["cat, red hat", "cat, dog", "dog", None, "cat, a*b"]
KEY = Qt.Key


@pytest.fixture
def pictures(session, tmp_path):
    folder = Folder(tmp_path, tmp_path)
    ids = session.library.add((folder, f"{n}.png", {"caption": text}) for n, text in enumerate(CAPTIONS))
    for number, text in zip(ids, CAPTIONS, strict=True):
        if text is not None:
            session.library.images[number].path.with_suffix(".txt").write_text(text, encoding="utf-8")
    return ids


@pytest.fixture
def place(qtbot, session, pictures):
    """A window with both, as on the page."""
    window = QWidget()
    window.resize(700, 600)
    commands = Commands(window)
    window.box = FilterBox(session, commands)
    window.panel = TagPanel(session, commands)
    layout = QVBoxLayout(window)
    layout.addWidget(window.box)
    layout.addWidget(window.panel)
    qtbot.addWidget(window)
    with qtbot.waitExposed(window):
        window.show()
    window.activateWindow()
    qtbot.waitUntil(lambda: len(window.panel.all.tags.rows) == 4 and len(session.view.ids) == 5)
    return window


def write(qtbot, box, text):
    """Type into the filter as a user does."""
    box.field.setFocus()
    box.field.selectAll()
    qtbot.keyClicks(box.field, text)


def test_typing_filters_after_a_pause_and_the_count_tells(qtbot, session, place, pictures):
    assert place.box.count.text().startswith("5 image")
    write(qtbot, place.box, "tag:cat")
    qtbot.waitUntil(lambda: session.view.ids == [pictures[0], pictures[1], pictures[4]])
    assert place.box.count.text() == "3 of 5"
    assert not place.box.fault.isVisible()


def test_enter_filters_at_once_and_remembers(qtbot, session, place, pictures):
    write(qtbot, place.box, "missing:caption")
    qtbot.keyClick(place.box.field, KEY.Key_Escape)  # the proposals
    qtbot.keyClick(place.box.field, KEY.Key_Return)
    assert session.view.ids == [pictures[3]]
    assert session.filters.recent[0] == "missing:caption"


def test_a_tag_that_is_being_completed_does_not_empty_the_grid(qtbot, session, place, pictures):
    box = place.box
    with qtbot.waitSignal(box._pause.timeout):
        write(qtbot, box, "tag:c")
    assert box.field.list.isVisible()
    assert session.view.ids == pictures
    qtbot.keyClick(box.field, KEY.Key_Escape)
    qtbot.waitUntil(lambda: session.view.ids == [])
    box.write("")
    write(qtbot, box, "tag:c")
    qtbot.keyClick(box.field, KEY.Key_Return)
    assert session.view.ids == []
    box.write("")
    write(qtbot, box, "tag:ca")
    qtbot.keyClicks(box.field, "t")
    qtbot.waitUntil(lambda: session.view.ids == [pictures[0], pictures[1], pictures[4]])


def test_escape_and_the_clear_button_show_everything_again(qtbot, session, place, pictures):
    write(qtbot, place.box, "dog")
    qtbot.keyClick(place.box.field, KEY.Key_Return)
    assert len(session.view.ids) == 2
    qtbot.keyClick(place.box.field, KEY.Key_Escape)
    assert session.view.ids == pictures
    place.box.write("dog")
    place.box.field.clear()
    qtbot.waitUntil(lambda: session.view.ids == pictures)


def test_what_is_wrong_is_underlined_and_said_below(qtbot, session, place, pictures):
    write(qtbot, place.box, "size:big colour:red")
    before = place.box.field.grab().toImage()
    qtbot.keyClick(place.box.field, KEY.Key_Return)
    assert '"big" is not a number.' in place.box.fault.text()
    assert 'There is no key "colour".' in place.box.fault.text()
    assert place.box.fault.isVisible()
    assert place.box.field.accessibleDescription() == place.box.fault.text()
    assert place.box.field.grab().toImage() != before
    assert session.view.ids == pictures
    assert place.box.field.text() == "size:big colour:red"
    write(qtbot, place.box, "dog")
    qtbot.keyClick(place.box.field, KEY.Key_Return)
    assert not place.box.fault.isVisible()


def test_what_is_wrong_stays_as_it_is_typed_while_the_filter_in_force_is_asked_again(qtbot, session, place, pictures):
    box = place.box
    write(qtbot, box, "tag:cat")
    qtbot.keyClick(box.field, KEY.Key_Return)
    write(qtbot, box, 'caption:"red h')
    qtbot.waitUntil(box.fault.isVisible)
    session.library.set_facts({pictures[2]: {"caption": "cat"}}, "caption")
    qtbot.waitUntil(lambda: session.view.ids == [pictures[0], pictures[1], pictures[2], pictures[4]])
    assert box.field.text() == 'caption:"red h' and box.fault.isVisible()


@pytest.mark.parametrize(
    ("typed", "label"),
    [("tag:", "fault"), ("tag:catx", "note")],
    ids=["a word is not found wrong", "a tag is not doubted"],
)
def test_what_is_still_typed_is_not_judged_at_once(qtbot, place, typed, label):
    judged = getattr(place.box, label)
    write(qtbot, place.box, typed)
    qtbot.waitUntil(place.box._patience.isActive)
    assert not judged.isVisible()
    qtbot.waitUntil(judged.isVisible)


def test_a_tag_that_no_picture_has_is_said_and_the_one_meant_is_a_click_away(qtbot, session, place, pictures):
    box = place.box
    write(qtbot, box, "tag:catt size:>=0 or tag:dgo")
    qtbot.keyClick(box.field, KEY.Key_Return)
    assert session.view.ids == []
    assert box.note.isVisible()
    words = re.sub("<br>", "\n", re.sub(r"</?a[^>]*>", "", box.note.text()))
    assert words == "No image has the tag catt. Did you mean cat?\nNo image has the tag dgo. Did you mean dog?"
    second = re.findall('href="([^"]*)"', box.note.text())[1]
    box.note.linkActivated.emit(html.unescape(second))
    assert box.field.text() == "tag:catt size:>=0 or tag:dog"
    assert session.view.ids == pictures[1:3]
    assert not box.note.isVisible()
    write(qtbot, box, "tag:<b>zzz")
    qtbot.keyClick(box.field, KEY.Key_Return)
    assert box.note.text() == "No image has the tag &lt;b&gt;zzz."
    session.filtering.apply("tag:dog")
    assert not box.note.isVisible()


def test_the_note_follows_the_colours(qtbot, session, place, qapp):
    theme = Theme(qapp, "light")
    place.box.write("tag:catt")
    assert place.box.note.isVisible()
    theme.choose("contrast")
    qapp.processEvents()
    image = place.box.note.grab().toImage()
    seen = {image.pixelColor(x, y).name() for x in range(image.width()) for y in range(image.height())}
    assert QColor(colors().link).name() in seen
    theme.choose("light")
    qapp.setStyleSheet("")
    theme.deleteLater()


def test_proposals_are_taken_by_tab_and_by_arrows(qtbot, session, place, pictures):
    write(qtbot, place.box, "tag:re")
    assert place.box.field.list.isVisible()
    qtbot.keyClick(place.box.field, KEY.Key_Tab)
    assert place.box.field.text() == 'tag:"red hat" '
    assert place.box.field.hasFocus()
    qtbot.waitUntil(lambda: session.view.ids == pictures[:1])
    write(qtbot, place.box, "ra")
    qtbot.keyClick(place.box.field, KEY.Key_Down)
    qtbot.keyClick(place.box.field, KEY.Key_Down)
    assert place.box.field.list.chosen.text == "rating:"
    qtbot.keyClick(place.box.field, KEY.Key_Up)
    qtbot.keyClick(place.box.field, KEY.Key_Return)
    assert place.box.field.text() == "ratio:"
    place.box.clear()


def test_proposals_are_taken_by_a_click_and_closed_by_escape(qtbot, place):
    write(qtbot, place.box, "tag:do")
    drop = place.box.field.list
    where = drop.visualRect(drop.model().index(0, 0)).center()
    qtbot.mouseClick(drop.viewport(), Qt.MouseButton.LeftButton, pos=where)
    assert place.box.field.text() == "tag:dog "
    place.box.field.propose()
    qtbot.keyClick(place.box.field, KEY.Key_Escape)
    assert not drop.isVisible()
    assert place.box.field.text() == "tag:dog "
    place.box.clear()


def test_a_filter_is_kept_chosen_and_forgotten(qtbot, session, place, pictures, monkeypatch, tmp_path):
    place.box.write("tag:dog")
    dialogs = []

    def accept(dialog):
        dialogs.append(dialog)
        dialog._name.setText("Dogs & co")
        dialog._scope.setCurrentIndex(1)
        return QDialog.DialogCode.Accepted

    monkeypatch.setattr(SaveDialog, "exec", accept)
    place.box.save()
    assert session.filters.of(tmp_path) == [SavedFilter("Dogs & co", "tag:dog", tmp_path)]
    place.box.clear()
    menu = place.box._make_menu()
    actions = {action.text(): action for action in menu.actions()}
    assert not actions["Save filter…"].isEnabled()
    actions["Dogs && co"].trigger()
    assert {action.text(): action for action in place.box._make_menu().actions()}["Save filter…"].isEnabled()
    assert session.view.ids == pictures[1:3]
    forget = next(action.menu() for action in menu.actions() if action.text() == "Delete saved filter")
    forget.actions()[0].trigger()
    assert session.filters.of(tmp_path) == []


def test_a_filter_without_a_name_is_not_kept(qtbot):
    dialog = SaveDialog("tag:dog", [Path("cats")])
    qtbot.addWidget(dialog)
    save = dialog._buttons.button(dialog._buttons.StandardButton.Save)
    assert (dialog.name, dialog.root, save.isEnabled()) == ("tag:dog", None, True)
    dialog._name.setText("  ")
    assert not save.isEnabled()


def rows(panel):
    return list(panel.all.tags.rows)


def choose(panel, tag):
    panel.all.setCurrentIndex(panel.all.tags.index_of(tag))


def test_tags_are_shown_with_counts_in_either_order(qtbot, place):
    panel = place.panel
    assert rows(panel) == [("cat", 3), ("dog", 2), ("a*b", 1), ("red hat", 1)]
    assert panel.heading.text().startswith("4 tag")
    qtbot.mouseClick(panel.sort, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: rows(panel) == [("a*b", 1), ("cat", 3), ("dog", 2), ("red hat", 1)])


def test_tags_are_searched(qtbot, place):
    place.panel.search_tags()
    qtbot.keyClicks(place.panel.search, "HAT")
    qtbot.waitUntil(lambda: rows(place.panel) == [("red hat", 1)])
    assert place.panel.heading.text() == "1 of 4 tags"


def test_a_click_filters_with_ctrl_adds_and_with_alt_excludes(qtbot, session, place, pictures):
    panel, view = place.panel, place.panel.all

    def click(tag, modifier=Qt.KeyboardModifier.NoModifier):
        where = view.visualRect(view.tags.index_of(tag)).center()
        qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, modifier, where)

    click("cat")
    assert place.box.field.text() == session.filtering.text == "tag:cat"
    panel.use("dog", Qt.KeyboardModifier.ControlModifier)
    assert session.filtering.text == "tag:cat tag:dog"
    panel.use("dog", Qt.KeyboardModifier.AltModifier)
    assert session.filtering.text == "tag:cat -tag:dog"
    click("a*b")
    assert session.view.ids == pictures[4:]


def test_keys_do_what_clicks_do(qtbot, session, place):
    view = place.panel.all
    view.setFocus()
    choose(place.panel, "cat")
    qtbot.keyClick(view, KEY.Key_Return)
    assert session.filtering.text == "tag:cat"
    choose(place.panel, "dog")
    qtbot.keyClick(view, KEY.Key_Return, Qt.KeyboardModifier.AltModifier)
    assert session.filtering.text == "tag:cat -tag:dog"
    qtbot.keyClick(view, KEY.Key_Return, Qt.KeyboardModifier.ControlModifier)
    assert session.filtering.text == "tag:cat tag:dog"


def test_an_empty_list_says_why(qtbot, session, place, pictures):
    place.panel.search.setText("zzz")
    qtbot.waitUntil(lambda: place.panel.all.tags.rows == [])
    assert place.panel.all.empty_text == "No tag contains this text."
    said = place.panel.all.grab().toImage()
    place.panel.all.empty_text = ""
    assert place.panel.all.grab().toImage() != said
    place.panel.search.clear()
    session.library.remove(pictures)
    qtbot.waitUntil(lambda: place.panel.all.empty_text == "Tags appear here.")


def test_companions_of_the_chosen_tag(qtbot, place):
    choose(place.panel, "cat")
    together = place.panel.together
    qtbot.waitUntil(lambda: list(together.tags.rows) == [("a*b", 1), ("dog", 1), ("red hat", 1)])
    assert place.panel.title.text() == "Seen together with cat"


def test_a_tag_is_renamed_everywhere_and_that_is_undone(qtbot, session, place, pictures, monkeypatch):
    choose(place.panel, "cat")
    monkeypatch.setattr(QInputDialog, "getText", lambda *_, **__: ("kitten", True))
    place.panel.rename()
    qtbot.waitUntil(lambda: ("kitten", 3) in rows(place.panel))
    assert session.library.images[pictures[0]].caption == "kitten, red hat"
    session.history.undo()
    qtbot.waitUntil(lambda: ("cat", 3) in rows(place.panel))
    session.saver.flush()
    assert session.library.images[pictures[0]].path.with_suffix(".txt").read_text(encoding="utf-8") == CAPTIONS[0]


def test_a_tag_is_removed_everywhere(qtbot, session, place, pictures):
    choose(place.panel, "cat")
    place.panel.remove()
    qtbot.waitUntil(lambda: rows(place.panel)[0] == ("dog", 2) and len(rows(place.panel)) == 3)
    assert session.library.images[pictures[0]].caption == "red hat"


def test_the_chosen_tag_stays_chosen_when_counts_change(qtbot, session, place, tmp_path):
    choose(place.panel, "dog")
    folder = Folder(tmp_path / "more", tmp_path)
    session.library.add((folder, f"{n}.png", {"caption": "dog"}) for n in range(3))
    qtbot.waitUntil(lambda: rows(place.panel)[0] == ("dog", 5))
    assert place.panel.all.tag == "dog"


def test_the_menu_of_a_tag(qtbot, session, place):
    choose(place.panel, "dog")
    actions = {action.text(): action for action in place.panel._make_menu(place.panel.all).actions()}
    actions["Exclude this tag"].trigger()
    assert session.filtering.text == "-tag:dog"
    assert "Rename tag everywhere…" in actions
    assert place.panel.all.indexAt(QPoint(5, 5)).isValid()


def test_models_keep_qts_rules(qtbot):
    tags, proposals = TagModel(), ProposalModel()
    many = [TagCount(f"tag {n}", n) for n in range(2500)]
    tags.show(many)
    assert tags.rowCount() == 1000
    testers = [QAbstractItemModelTester(model) for model in (tags, proposals)]  # they fetch what there is
    tags.show(many)
    while tags.canFetchMore(QModelIndex()):
        tags.fetchMore(QModelIndex())
    assert tags.rowCount() == 2500
    tags.show(tags.rows[:3])
    proposals.show([])
    assert tags.data(tags.index(1), Qt.ItemDataRole.AccessibleTextRole).startswith("tag 1, 1 image")
    assert len(testers) == 2


def test_sorting_in_parts_equals_sorting_at_once():
    counts = [(f"{(n * 7919) % 12007}", n % 13) for n in range(12007)]
    assert sort_tags(counts, "count") == sorted(counts, key=lambda pair: (-pair[1], pair[0]))
    assert sort_tags(counts, "name") == sorted(counts, key=lambda pair: (pair[0].casefold(), pair[0]))


def test_every_control_has_a_name(place):
    nameless = []
    for widget in place.findChildren(QWidget):
        if widget.focusPolicy() != Qt.FocusPolicy.NoFocus and widget.isVisible():
            interface = QAccessible.queryAccessibleInterface(widget)
            if interface and not interface.text(QAccessible.Text.Name):
                nameless.append(widget)
    assert nameless == []


def test_help_shows_the_language(qtbot):
    dialog = HelpDialog()
    qtbot.addWidget(dialog)
    assert dialog.windowTitle() == "Filter syntax"


def test_nothing_is_sorted_while_nobody_looks(qtbot, session, place, pictures, tmp_path):
    place.panel.hide()
    session.library.add([(Folder(tmp_path, tmp_path), "late.png", {"caption": "late"})])
    assert not place.panel._update_timer.isActive()
    place.panel.show()
    qtbot.waitUntil(lambda: ("late", 1) in rows(place.panel))


def test_long_words_do_not_widen_the_panel(qtbot, session, place, tmp_path):
    narrow = place.panel.minimumSizeHint().width()
    session.library.add([(Folder(tmp_path, tmp_path), "late.png", {"caption": "long " * 30})])
    qtbot.waitUntil(lambda: len(rows(place.panel)) == 5)
    choose(place.panel, ("long " * 30).strip())
    qtbot.waitUntil(lambda: place.panel.title.text().startswith("Seen together with long"))
    assert place.panel.minimumSizeHint().width() == narrow
