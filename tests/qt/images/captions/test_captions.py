"""The caption editor through clicks and keys on the real window, over real files."""

import pytest
from PIL import Image
from PySide6.QtCore import QPoint, Qt, QTranslator
from PySide6.QtWidgets import QApplication

from app.core.edits.history import Edit
from app.core.library import ValueChange
from app.qt.images.captions.chips import ChipData
from app.qt.widgets import FOLDER
from app.qt.window import Window

KEY = Qt.Key
CONTROL, SHIFT = Qt.KeyboardModifier.ControlModifier, Qt.KeyboardModifier.ShiftModifier
CAPTIONS = {"a": "cat,  red hat,dog", "b": "dog, cat", "c": "dog", "d": None, "e": ""}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "Bilder für 猫"
    folder.mkdir()
    for name, text in CAPTIONS.items():
        Image.new("RGB", (64, 48), "red").save(folder / f"{name}.png")
        if text is not None:
            (folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.fixture
def english(qapp):
    """The plural forms that the app speaks."""
    translator = QTranslator(qapp)
    assert translator.load(str(FOLDER / "impasto_en.qm"))
    qapp.installTranslator(translator)
    yield
    qapp.removeTranslator(translator)


@pytest.fixture
def window(qtbot, session, folder, english):
    window = Window(session)
    qtbot.addWidget(window)
    with qtbot.waitExposed(window):
        window.show()
    window.activateWindow()
    window.open([folder])
    qtbot.waitUntil(lambda: len(session.view.ids) == 5 and captions(session) == CAPTIONS)
    return window


@pytest.fixture
def editor(window):
    return window.images.editor


def captions(session):
    return {picture.path.stem: picture.caption for picture in session.library.images.values()}


def select(session, *names):
    ids = [picture.id for picture in session.library.images.values() if picture.path.stem in names]
    session.view.select(ids, ids[0])


def tags(editor):
    return [chip.chip.tag for chip in editor.chips.chips]


def on_disk(folder, name):
    return (folder / f"{name}.txt").read_bytes().decode("utf-8")


def test_one_key_leads_to_the_line_and_enter_adds_and_stays(window, editor, session, folder, qtbot):
    select(session, "a")
    window.commands.refresh_now()
    qtbot.keyClick(window, KEY.Key_Slash)
    assert editor.line.hasFocus()
    qtbot.keyClicks(editor.line, "blue sky")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert editor.line.hasFocus()
    assert editor.line.text() == ""
    assert editor.text.text == "cat,  red hat,dog, blue sky"
    assert tags(editor) == ["cat", "red hat", "dog", "blue sky"]
    qtbot.waitUntil(lambda: on_disk(folder, "a") == "cat,  red hat,dog, blue sky")


def test_shift_enter_adds_at_the_front_and_several_at_once(editor, session, qtbot):
    select(session, "b")
    qtbot.keyClicks(editor.line, "one, two")
    qtbot.keyClick(editor.line, KEY.Key_Return, SHIFT)
    assert captions(session)["b"] == "one, two, dog, cat"


def test_of_a_list_that_is_pasted_into_the_line_each_line_is_a_tag(editor, session, qtbot):
    select(session, "b")
    editor.line.setFocus()
    QApplication.clipboard().setText("left arm, sun\nsea\n")
    qtbot.keyClick(editor.line, KEY.Key_V, CONTROL)
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert captions(session)["b"] == "dog, cat, left arm, sun, sea"


def test_the_line_steps_between_pictures_without_losing_the_keyboard(editor, session, qtbot):
    select(session, "a")
    editor.line.setFocus()
    current = lambda: session.library.images[session.view.current].path.stem  # noqa: E731
    qtbot.keyClicks(editor.line, "half")
    qtbot.keyClick(editor.line, KEY.Key_Down, CONTROL)
    assert (current(), editor.line.text()) == ("b", "half")
    qtbot.keyClick(editor.line, KEY.Key_Escape)
    qtbot.keyClick(editor.line, KEY.Key_Escape)
    editor.line.setFocus()
    qtbot.keyClick(editor.line, KEY.Key_Right)
    assert current() == "c"
    qtbot.keyClick(editor.line, KEY.Key_Left)
    qtbot.keyClick(editor.line, KEY.Key_Up, CONTROL)
    assert current() == "a"
    assert editor.line.hasFocus()
    assert tags(editor) == ["cat", "red hat", "dog"]


def test_completion_proposes_the_datasets_own_tags_by_frequency(editor, session, qtbot):
    select(session, "d")
    editor.line.setFocus()
    qtbot.keyClicks(editor.line, "d")
    assert editor.line.list.isVisible()
    proposals = editor.line.list.proposals.proposals
    assert (proposals[0].text, proposals[0].images) == ("dog", 3)
    qtbot.keyClick(editor.line, KEY.Key_Down)
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert captions(session)["d"] == "dog"


def test_what_is_typed_is_added_even_where_a_proposal_would_be_longer(editor, session, qtbot):
    select(session, "c")
    editor.line.setFocus()
    qtbot.keyClicks(editor.line, "ca")
    assert editor.line.list.isVisible()
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert captions(session)["c"] == "dog, ca"


def test_typing_is_one_step_of_undo_and_the_window_says_which(window, editor, session, folder, qtbot):
    select(session, "a")
    editor.text.setFocus()
    qtbot.keyClick(editor.text, KEY.Key_End, CONTROL)
    qtbot.keyClicks(editor.text, ", owl")
    assert tags(editor) == ["cat", "red hat", "dog", "owl"]
    window.commands.refresh_now()
    qtbot.keyClick(editor.text, KEY.Key_Z, CONTROL)
    assert captions(session)["a"] == CAPTIONS["a"]
    assert editor.text.text == CAPTIONS["a"]
    assert "Edit the caption of a.png" in window.status.currentMessage()


def test_a_pause_of_typing_begins_another_step(editor, session, qtbot):
    select(session, "b")
    editor.text.setFocus()
    qtbot.keyClick(editor.text, KEY.Key_End, CONTROL)
    qtbot.keyClicks(editor.text, "1")
    qtbot.waitUntil(lambda: not editor._pause.isActive())
    qtbot.keyClicks(editor.text, "2")
    assert captions(session)["b"] == "dog, cat12"
    session.history.undo()
    assert captions(session)["b"] == "dog, cat1"


@pytest.mark.parametrize("text", ["cat\u00a0tree, dog", "a\u2028b, c\x0bd", "😀, 猫\n\n , x ,,y"])
def test_what_is_not_touched_stays_character_by_character(editor, session, text, qtbot):
    select(session, "a")
    number = session.view.current
    session.library.set_facts({number: {"caption": text}}, "caption")
    editor.text.setFocus()
    qtbot.keyClick(editor.text, KEY.Key_End, CONTROL)
    qtbot.keyClicks(editor.text, "z")
    assert captions(session)["a"] == text + "z"
    qtbot.keyClick(editor.text, KEY.Key_Home, CONTROL)
    qtbot.keyClick(editor.text, KEY.Key_Delete)
    rest = text[1:]
    assert captions(session)["a"] == rest + "z"
    editor.text.selectAll()
    qtbot.keyClicks(editor.text, "new")
    assert captions(session)["a"] == "new"


def test_what_is_pasted_keeps_its_spaces_and_lines(editor, session, qtbot):
    select(session, "b")
    editor.text.setFocus()
    QApplication.clipboard().setText("x\u00a0y\nz, ")
    qtbot.keyClick(editor.text, KEY.Key_V, CONTROL)
    assert captions(session)["b"] == "x\u00a0y\nz, dog, cat"


def test_missing_and_empty_captions_are_told_apart(editor, session):
    select(session, "d")
    assert "No caption file yet" in editor.state.text()
    select(session, "e")
    assert "The caption file is empty." in editor.state.text()
    select(session, "a")
    assert editor.state.text() == ""


def test_what_is_wrong_with_a_picture_names_it_shortly(editor, session):
    select(session, "a")
    picture = next(one for one in session.library.images.values() if one.path.stem == "a")
    session.library.set_facts({picture.id: {"problem": f"{picture.path} is empty (0 bytes)."}}, "problem")
    assert editor.state.text() == f"{picture.name} is empty (0 bytes)."


def test_of_many_pictures_common_tags_are_plain_and_mixed_ones_counted(editor, session, folder, qtbot):
    select(session, "a", "b", "c")
    assert [(chip.chip.tag, chip.chip.have, chip.chip.total) for chip in editor.chips.chips] == [
        ("dog", 3, 3),
        ("cat", 2, 3),
        ("red hat", 1, 3),
    ]
    assert editor.chips.chips[1].text() == "cat  in 2 of 3"
    assert not editor.text.isVisible()
    assert editor.hint.isVisible()
    editor.chips.choose(1)
    qtbot.keyClick(editor.chips.chips[1], KEY.Key_Return)
    assert captions(session)["c"] == "dog, cat"
    assert session.history.undo_name == "Add cat to 1 caption"
    qtbot.waitUntil(lambda: [chip.text() for chip in editor.chips.chips] == ["cat", "dog", "red hat  in 1 of 3"])
    editor.line.setFocus()
    qtbot.keyClicks(editor.line, "new")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    qtbot.waitUntil(lambda: "new" in tags(editor))
    assert session.history.undo_name == "Add new to 3 captions"
    number = tags(editor).index("dog")
    editor.chips.choose(number)
    qtbot.keyClick(editor.chips.chips[number], KEY.Key_Delete)
    assert captions(session)["a"] == "cat,  red hat,new"
    session.history.undo()
    session.history.undo()
    session.history.undo()
    assert captions(session) == CAPTIONS
    session.saver.flush()
    assert on_disk(folder, "a") == CAPTIONS["a"]


def test_many_say_how_many_have_no_caption(editor, session):
    select(session, *"abcde")
    assert editor.title.toolTip() == "5 images"
    assert editor.state.text() == "1 without a caption file, 1 with an empty caption"


def test_repeated_tags_are_marked(editor, session, qtbot):
    select(session, "c")
    editor.text.setFocus()
    qtbot.keyClick(editor.text, KEY.Key_End, CONTROL)
    qtbot.keyClicks(editor.text, ", dog")
    assert [chip.chip.repeated for chip in editor.chips.chips] == [False, True]
    assert "already in this caption" in editor.chips.chips[1].accessibleName()
    qtbot.keyClicks(editor.line, "dog")
    qtbot.keyClick(editor.line, KEY.Key_Escape)
    qtbot.keyClicks(editor.line, "")
    with qtbot.waitSignal(editor.message_shown) as said:
        qtbot.keyClicks(editor.line, "dog")
        qtbot.keyClick(editor.line, KEY.Key_Return)
    assert said.args == ["Already in the caption: dog"]


def test_commas_alone_add_nothing_and_nothing_is_said(editor, session, qtbot):
    select(session, "c")
    before = editor.text.toPlainText()
    with qtbot.assertNotEmitted(editor.message_shown):
        qtbot.keyClicks(editor.line, " ,, ")
        qtbot.keyClick(editor.line, KEY.Key_Return)
    assert editor.text.toPlainText() == before


def test_lines_are_shown_as_alternatives_where_they_are(window, editor, session, qtbot):
    select(session, "a")
    session.library.set_facts({session.view.current: {"caption": "cat, hat\ndog, hat"}}, "caption")
    assert editor.state.text() == "2 lines, read as one caption."
    assert tags(editor) == ["cat", "hat dog", "hat"]
    qtbot.mouseClick(editor.variants, Qt.MouseButton.LeftButton, pos=QPoint(10, editor.variants.height() // 2))
    assert editor.state.text() == "2 alternative captions, one per line."
    assert [(chip.chip.tag, chip.chip.row) for chip in editor.chips.chips] == [
        ("cat", 0),
        ("hat", 0),
        ("dog", 1),
        ("hat", 1),
    ]
    assert not any(chip.chip.repeated for chip in editor.chips.chips)
    assert editor.chips.chips[2].y() > editor.chips.chips[0].y()


def test_tokens_are_counted_and_the_cut_is_marked(editor, session, qtbot):
    select(session, "a")
    qtbot.waitUntil(lambda: editor.count.text() == "6 of 75 tokens")
    long = ", ".join(["cat"] * 50)  # 99 tokens: each comma is one
    session.library.set_facts({session.view.current: {"caption": long}}, "caption")
    assert editor.count.text() == "99 of 75 tokens, 24 truncated"
    dimmed = editor.text.extraSelections()
    assert dimmed[0].cursor.selectedText() == long[len("cat, " * 37) + 3 :]  # the 75th token is the 38th cat
    qtbot.keyClick(editor.limit, KEY.Key_Down)
    assert editor.count.text() == "99 of 150 tokens, chunk 2 of 2"
    assert session.health.target.tokens == 150  # one choice for editor and problems
    session.settings.set_checks(tokens=225)
    assert (editor.count.text(), editor.limit.currentText()) == ("99 of 225 tokens, chunk 2 of 3", "225")
    session.settings.set_checks(tokens=150)
    assert editor.text.extraSelections() == []
    picture = session.library.images[session.view.current]
    picture.folder.trigger = "sks person"
    session.library.set_facts({session.view.current: {"caption": "cat"}}, "caption")
    assert editor.count.text() == "4 of 150 tokens"  # "sks person, cat"


def test_the_next_picture_without_caption_is_one_key_away(window, editor, session, qtbot):
    select(session, "a")
    window.commands.refresh_now()
    stems = []
    for _ in range(3):
        qtbot.keyClick(window, KEY.Key_J, CONTROL)
        stems.append(session.library.images[session.view.current].path.stem)
    assert stems == ["d", "e", "d"]


def test_every_control_has_a_name(editor, session):
    select(session, "a")
    for part in (editor.line, editor.text, editor.limit, *editor.chips.chips):
        assert part.accessibleName(), part
        assert part.focusPolicy() != Qt.FocusPolicy.NoFocus


def test_what_a_filter_hides_is_not_edited_and_that_is_said(editor, session, qtbot):
    before = captions(session)
    select(session, "a", "b")
    session.filtering.apply("tag:nothing")
    assert (tags(editor), editor.text.text, editor.has_images()) == ([], "", False)
    assert not editor.line.isVisible()
    assert not editor.text.isVisible()
    assert editor.hint.text() == "The filter hides 2 selected images, which will not be changed."
    assert editor.hint.isVisible()
    session.filtering.apply('tag:"red hat"')
    assert tags(editor) == ["cat", "red hat", "dog"]
    assert editor.hint.text() == "The filter hides 1 selected image, which will not be changed."
    qtbot.keyClicks(editor.line, "new")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert captions(session) == before | {"a": "cat,  red hat,dog, new"}
    session.filtering.apply("")
    assert editor.title.toolTip() == "2 images"
    assert "hides" not in editor.hint.text()
    select(session, "c")
    assert not editor.hint.isVisible()
    session.filtering.apply("tag:nothing")
    assert editor.hint.text() == "The filter hides 1 selected image, which will not be changed."
    assert editor.title.toolTip() == "No selected image is shown"


@pytest.mark.parametrize("selected", [True, False])
def test_a_picture_that_is_being_edited_stays_though_the_filter_passes_it_over(editor, session, qtbot, selected):
    select(session, "c")
    if not selected:
        session.view.select([], session.view.current)
    session.filtering.apply("tag:dog -tag:cat")
    editor.text.setFocus()
    qtbot.keyClick(editor.text, KEY.Key_End, CONTROL)
    qtbot.keyClicks(editor.text, "s and ")
    assert captions(session)["c"] == "dogs and "
    session.filtering.refresh()
    assert editor.has_one()
    qtbot.keyClicks(editor.text, "more")
    assert captions(session)["c"] == "dogs and more"
    assert not editor.hint.isVisible()


def test_a_half_typed_tag_is_added_when_the_window_closes(window, editor, session, folder, qtbot):
    select(session, "b", "c")
    qtbot.keyClicks(editor.line, "half")
    window.close()
    assert (captions(session)["b"], captions(session)["c"]) == ("dog, cat, half", "dog, half")
    session.saver.flush()
    assert on_disk(folder, "c") == "dog, half"


def test_of_many_pictures_too_a_half_typed_tag_is_added_before_the_window_is_closed(
    window, editor, session, qtbot, monkeypatch
):
    monkeypatch.setattr("app.qt.images.captions.editor.AT_ONCE", 1)
    select(session, "b", "c")
    qtbot.keyClicks(editor.line, "half")
    window.close()
    assert captions(session)["c"] == "dog, half"


def test_a_caption_of_another_encoding_is_told_in_the_right_number(window, editor, session, folder, qtbot):
    (folder / "c.txt").write_bytes("café".encode("cp1252"))
    session.datasets.refresh(whole=True)
    qtbot.waitUntil(lambda: captions(session)["c"] == "café")
    select(session, "c")
    qtbot.keyClicks(editor.line, "cup")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    words = "Converted 1 caption in Bilder für 猫 from another encoding to UTF-8. The originals are backed up."
    assert words in window.notices.sentences()[0]


def test_of_a_caption_of_thousands_of_tags_only_the_first_become_chips(editor, session, qtbot, monkeypatch):
    made = []
    monkeypatch.setattr(
        "app.qt.images.captions.chips.ChipData", lambda tag, **rest: made.append(tag) or ChipData(tag, **rest)
    )
    select(session, "a")
    made.clear()
    many = [f"t{number:04}" for number in range(6667)]
    picture = session.library.images[session.view.current]
    change = ValueChange(picture.id, "caption", picture.caption, ", ".join(many))
    session.history.do(Edit("Write many", (change,)))
    assert tags(editor) == many[:120] == [tag for tag in made if tag]  # a chip begins with none
    assert editor.more.text() == "+6547 more tags"
    assert editor.more.isVisible()
    qtbot.keyClicks(editor.line, "last")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert captions(session)["a"] == ", ".join([*many, "last"])
    assert editor.more.text() == "+6548 more tags"
    qtbot.mouseClick(editor.more, Qt.MouseButton.LeftButton)
    assert tags(editor) == many[:240] and editor.more.text() == "+6428 more tags"
    select(session, "b")
    assert not editor.more.isVisible()
    select(session, "a")
    assert tags(editor) == many[:120]
