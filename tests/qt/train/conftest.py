"""The Train page with a new job."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.core.session import Session
from app.qt.train.page import TrainPage
from app.qt.window import Window
from tests.support.jobs import photographs
from tests.support.train_page import shown


@pytest.fixture
def page(window: Window, session: Session, qtbot: QtBot, tmp_path: Path) -> TrainPage:
    """The page with a new job for three pictures that are open."""
    window.resize(1280, 900)
    session.datasets.open(photographs(tmp_path / "katzen ü", 3))
    qtbot.waitUntil(lambda: len(session.library.images) == 3)
    return shown(window, qtbot)
