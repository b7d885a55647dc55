"""Translations: complete where they must be, with the placeholders of their sources, and really shown."""

import re
import shutil
from xml.etree import ElementTree

import pytest
from PySide6.QtCore import QCoreApplication, QLocale, QTranslator

from app.i18n import __main__
from app.qt.widgets import FOLDER, install_language, languages
from app.qt.window import Window

PLACEHOLDER = re.compile(r"\{[^{}]*\}|%n|%L?\d+")


def messages(path):
    """Each message of a .ts file: context, source, whether it has plural forms, and its finished translations."""
    for context in ElementTree.parse(path).iter("context"):
        for message in context.iter("message"):
            translation = message.find("translation")
            forms = [form.text or "" for form in translation.iter("numerusform")] or [translation.text or ""]
            finished = forms if translation.get("type") is None else []
            yield context.findtext("name"), message.findtext("source"), message.get("numerus") == "yes", finished


def wrong_placeholders(path):
    """The translations whose placeholders are not those of their source; a plural form may spell the number out."""
    for context, source, plural, forms in messages(path):
        wanted = sorted(PLACEHOLDER.findall(source))
        for form in forms:
            found = sorted(PLACEHOLDER.findall(form))
            if found != wanted and not (plural and sorted([*found, "%n"]) == wanted):
                yield context, source, form


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ts")), ids=lambda path: path.stem)
def test_placeholders_agree_with_their_sources(path):
    assert list(wrong_placeholders(path)) == []


def test_a_lost_placeholder_would_be_seen(tmp_path):
    text = (FOLDER / "impasto_en.ts").read_text(encoding="utf-8")
    broken = tmp_path / "broken.ts"
    broken.write_text(text.replace("Copied %n image into {folder}.", "Copied %n image into {}."), encoding="utf-8")
    assert [form for _, _, form in wrong_placeholders(broken)] == ["Copied %n image into {}."]


def test_english_has_every_plural_form_that_the_app_uses(tmp_path):
    target = shutil.copy(FOLDER / "impasto_en.ts", tmp_path)
    __main__.collect(tmp_path / "impasto_en.ts")
    missing = [source for _, source, _, forms in messages(target) if not forms]
    assert missing == []
    hint = "run: python -m app.i18n"
    assert list(messages(target)) == list(messages(FOLDER / "impasto_en.ts")), hint


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--nosuch", 2), ("xx", 2), ("../de", 2), ("DE", 2)])
def test_only_languages_are_begun(word, code, tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "FOLDER", tmp_path)
    with pytest.raises(SystemExit) as ended:
        __main__.main([word])
    assert (ended.value.code, list(tmp_path.iterdir())) == (code, [])
    assert [__main__.language(one) for one in ("de", "pt_BR", "zh_TW", "en")] == ["de", "pt_BR", "zh_TW", "en"]


@pytest.mark.parametrize("code", languages())
def test_the_compiled_file_is_that_of_the_text(code, tmp_path):
    compiled = tmp_path / "compiled.qm"
    __main__.run("lrelease", str(FOLDER / f"impasto_{code}.ts"), "-qm", str(compiled))
    assert compiled.read_bytes() == (FOLDER / f"impasto_{code}.qm").read_bytes(), "run: python -m app.i18n"


@pytest.fixture
def application(qapp):
    """The application, which speaks as before after the test."""
    locale = QLocale()
    yield qapp
    for translator in qapp.findChildren(QTranslator):
        qapp.removeTranslator(translator)
        translator.deleteLater()
    QLocale.setDefault(locale)


def test_numbers_have_their_forms_in_english(application):
    install_language(application, "en")
    assert QCoreApplication.translate("StatusBar", "%n image(s)", "", 1) == "1 image"
    assert QCoreApplication.translate("StatusBar", "%n image(s)", "", 2) == "2 images"


def test_qts_own_words_come_in_the_users_language(application):
    install_language(application, "de")
    assert QCoreApplication.translate("QPlatformTheme", "Cancel") == "Abbrechen"
    assert QCoreApplication.translate("StatusBar", "%n image(s)", "", 2) == "2 images"  # ours are not there yet


def test_every_title_of_a_command_can_be_translated(tmp_path, session, qtbot):
    window = Window(session)
    qtbot.addWidget(window)
    __main__.collect(tmp_path / "impasto_xx.ts")
    known = {(context, source) for context, source, _, _ in messages(tmp_path / "impasto_xx.ts")}
    texts = [text for command in window.commands for text in (command.action.title, command.action.tip) if text]
    assert [text for text in texts if ("Action", text) not in known] == []
