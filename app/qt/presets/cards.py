"""Preset cards, and the details of the selected preset: image, origin, purpose, time, memory and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from PySide6.QtCore import (
    QAbstractListModel,
    QCoreApplication,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QPainter, QPainterPath, QPixmap
from PySide6.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs.settings import full_title, setting
from app.core.pixels import Pixels
from app.core.planning.forecaster import GPU_MEMORY_SIZES, HERE
from app.core.presets.cost_estimates import CostEstimate, CostEstimates
from app.qt.tables import Row, Table
from app.qt.theme import colors, icon
from app.qt.train.words import base_precision, fit, format_duration, format_memory, gibibytes, headline
from app.qt.widgets import QT_TRANSLATE_NOOP, ComboBox, FlowLayout, plain_label, set_message, to_pixmap, until_destroyed
from trainer.config.presets.library import Origin, PresetEntry, changed_keys
from trainer.config.presets.preset import Preset
from trainer.config.resolve import flatten
from trainer.config.schema import fields
from trainer.config.toml_file import toml_value
from trainer.files.architecture import NAMES

ORIGINS: Mapping[Origin, str] = {
    "yours": QT_TRANSLATE_NOOP("Presets", "yours"),
    "received": QT_TRANSLATE_NOOP("Presets", "received"),
    "built-in": QT_TRANSLATE_NOOP("Presets", "built-in"),
}
_ENTRY = int(Qt.ItemDataRole.UserRole)
IMAGE = 168
"""Longest side of a preview image, in logical pixels."""


def origin_words(origin: Origin) -> str:
    """Return the translated name of a preset's origin."""
    return QCoreApplication.translate("Presets", ORIGINS[origin])


def author_and_license(preset: Preset) -> str:
    """Return a preset's author and license as text."""
    author = (
        QCoreApplication.translate("Presets", "by {author}").format(author=preset.author)
        if preset.author
        else QCoreApplication.translate("Presets", "author unknown")
    )
    license_name = preset.license or QCoreApplication.translate("Presets", "no license given")
    return f"{author} · {license_name}"


def cost_line(outlook: CostEstimate | None) -> str:
    """Return a preset's training time and memory as one line for its card."""
    if outlook is None:
        return QCoreApplication.translate("Presets", "Estimating time and memory…")
    answer = outlook.answer
    if answer is None:
        return outlook.problem
    if answer.pick is None:
        return QCoreApplication.translate("Presets", "Does not fit: needs {missing} more memory").format(
            missing=format_memory(answer.missing)
        )
    if answer.on_cpu:
        about = QCoreApplication.translate("Presets", "About {time} on the CPU")
        return about.format(time=format_duration(answer.pick.forecast.seconds))
    words = QCoreApplication.translate("Presets", "About {time}, {needed} of {free} GiB")
    time, needed = format_duration(answer.pick.forecast.seconds), gibibytes(answer.pick.needed)
    cost = words.format(time=time, needed=needed, free=gibibytes(answer.gpu.free))
    return cost if answer.pick.quality == "exact" else f"{cost}, {base_precision(answer.pick.fit)}"


def cost_text(outlook: CostEstimate | None, gpu: str) -> str:
    """Return sentences about a preset's training time and memory on a GPU, and the fit to use there."""
    if outlook is None:
        return QCoreApplication.translate("Presets", "Estimating time and memory…")
    if outlook.answer is None:
        return outlook.problem
    answer = outlook.answer
    sentences = [headline(answer, here=gpu == HERE)]
    if answer.pick is not None and not answer.on_cpu:
        sentences.append(
            QCoreApplication.translate("Presets", "Fit: {fit}.").format(
                fit=fit(answer.pick.fit, answer.effective_batch)
            )
        )
    elif answer.reduced_recipe is not None:
        changes = ", ".join(f"{full_title(key)} {value}" for key, value in answer.changes.items())
        sentences.append(QCoreApplication.translate("Presets", "It fits with {changes}.").format(changes=changes))
    if answer.on_cpu:
        sentences.append(QCoreApplication.translate("Presets", "No NVIDIA GPU was found, so training uses the CPU."))
    return " ".join(sentences)


@lru_cache(maxsize=1)
def key_docs() -> Mapping[str, str]:
    """Return the documentation of each key in the preset format."""
    return {each.key: each.doc for each in fields(Preset)}


def doc_of(key: str) -> str:
    """Return the documentation of a preset, recipe or fit key; "" if the key is unknown."""
    docs = key_docs()
    return docs.get(key) or docs.get(f"recipe.{key}") or docs.get(f"fit.{key}") or ""


def choices_of(key: str) -> tuple[object, ...]:
    """Return the allowed values of a recipe or fit key; () for other keys."""
    for path in (key, f"recipe.{key}", f"fit.{key}"):
        with contextlib.suppress(KeyError):
            return setting(path).choices
    return ()


_Index = QModelIndex | QPersistentModelIndex
_IMAGE, _PAD, _GAP, _LINE = 72, 12, 12, 4


class PresetModel(QAbstractListModel):
    """List model of the shown presets; `outlook` returns the estimate of a preset's time and memory, if known yet."""

    def __init__(self, outlook: Callable[[PresetEntry], CostEstimate | None], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[PresetEntry] = []
        self.outlook = outlook

    def show(self, rows: Sequence[PresetEntry]) -> None:
        """Show these presets."""
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def renew(self) -> None:
        """Repaint all cards, because time and memory estimates or images have arrived."""
        if self.rows:
            self.dataChanged.emit(self.index(0), self.index(len(self.rows) - 1))

    def index_of(self, path: Path | None) -> QModelIndex:
        """Return the index of the preset in this file; an invalid index if it is not shown."""
        row = next((row for row, each in enumerate(self.rows) if each.path == path), -1)
        return self.index(row) if row >= 0 else QModelIndex()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return the number of presets shown."""
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return a preset's name, its entry, or the card's text for screen readers."""
        if not index.isValid():
            return None
        each = self.rows[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return each.preset.name
        if role == _ENTRY:
            return each
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return ", ".join(self.lines(each))
        return None

    def lines(self, each: PresetEntry) -> tuple[str, str, str, str]:
        """Return the lines on a card: name with family, origin, purpose, and training time with memory."""
        preset = each.preset
        what = preset.notes.partition("\n")[0] or self.tr("No description given.")
        cost = (
            cost_line(self.outlook(each)) if preset.recipe is not None else self.tr("A fit: settings that save memory")
        )
        origin = author_and_license(preset) if each.origin != "built-in" else origin_words("built-in")
        return f"{preset.name}, {NAMES[preset.base.family]}", origin, what, cost


class PresetDelegate(QStyledItemDelegate):
    """Delegate that paints a card."""

    def __init__(self, model: PresetModel, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._model = model
        self.images: Mapping[str, Pixels] = {}
        """Decoded preview images, keyed by their encoded text."""
        self._pixmaps: dict[tuple[str, float], QPixmap] = {}

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint the background, the image and four lines of text."""
        each = index.data(_ENTRY)
        scheme, chosen = colors(), bool(option.state & QStyle.StateFlag.State_Selected)
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        elif option.state & QStyle.StateFlag.State_MouseOver:
            painter.fillRect(option.rect, QColor(scheme.hover))
        painter.fillRect(QRect(option.rect.left(), option.rect.bottom(), option.rect.width(), 1), QColor(scheme.line))
        inside = option.rect.adjusted(_PAD, _PAD, -_PAD, -_PAD)
        self._image(painter, QRect(inside.left(), inside.top(), _IMAGE, _IMAGE), each)
        inside.setLeft(inside.left() + _IMAGE + _GAP)
        lines = self._model.lines(each)[1:]
        bold = QFont(option.font)
        bold.setBold(True)
        strong, weak = (scheme.on_accent, scheme.on_accent) if chosen else (scheme.text, scheme.muted)
        family = NAMES[each.preset.base.family]
        room = self._line(painter, inside, family, option.font, weak, Qt.AlignmentFlag.AlignRight)
        top = QRect(inside.left(), inside.top(), inside.width() - room - _GAP, inside.height())
        self._line(painter, top, each.preset.name, bold, strong)
        for line, color in zip(lines, (weak, strong, weak), strict=True):
            inside.setTop(inside.top() + option.fontMetrics.height() + _LINE)
            self._line(painter, inside, line, option.font, color)

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return a card's size; it fits four lines and the image."""
        lines = 4 * option.fontMetrics.height() + 3 * _LINE
        return QSize(300, max(lines, _IMAGE) + 2 * _PAD)

    @staticmethod
    def _line(
        painter: QPainter,
        place: QRect,
        text: str,
        font: QFont,
        color: str,
        side: Qt.AlignmentFlag = Qt.AlignmentFlag.AlignLeft,
    ) -> int:
        """Paint one line, elided if it is too long, and return its width."""
        painter.setFont(font)
        painter.setPen(QColor(color))
        metrics = painter.fontMetrics()
        shown = metrics.elidedText(text, Qt.TextElideMode.ElideRight, place.width())
        painter.drawText(place, int(side | Qt.AlignmentFlag.AlignTop), shown)
        return metrics.horizontalAdvance(shown)

    def _image(self, painter: QPainter, place: QRect, each: PresetEntry) -> None:
        """Paint the preset's image cropped to a square, or an icon if it has none."""
        scheme = colors()
        shape = QPainterPath()
        shape.addRoundedRect(QRectF(place), 6, 6)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.fillPath(shape, QColor(scheme.raised))
        painter.setClipPath(shape)
        pixmap = self._pixmap(each, painter.device().devicePixelRatioF())
        if pixmap is None:
            side = 24
            icon("presets" if each.preset.recipe is not None else "settings", "muted").paint(
                painter, QRect(place.center().x() - side // 2, place.center().y() - side // 2, side, side)
            )
        else:
            size = pixmap.deviceIndependentSize()
            painter.drawPixmap(
                place.center().x() - round(size.width() / 2), place.center().y() - round(size.height() / 2), pixmap
            )
        painter.restore()

    def _pixmap(self, each: PresetEntry, ratio: float) -> QPixmap | None:
        text = each.preset.preview.image if each.preset.preview else ""
        pixels = self.images.get(text)
        if pixels is None:
            return None
        if (text, ratio) not in self._pixmaps:
            # The shorter side fills the square and the rest is cropped; beyond 4:1 the image would waste memory.
            longest = max(pixels.width, pixels.height) / max(min(pixels.width, pixels.height), 1)
            self._pixmaps[text, ratio] = to_pixmap(pixels, round(_IMAGE * min(longest, 4.0)), ratio)
        return self._pixmaps[text, ratio]


class PresetListView(QListView):
    """List of preset cards; emits `looked` when other cards may have come into view."""

    looked = Signal()

    def __init__(self, outlook: Callable[[PresetEntry], CostEstimate | None], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.cards = PresetModel(outlook, self)
        self.painter = PresetDelegate(self.cards, self)
        self.setModel(self.cards)
        self.setItemDelegate(self.painter)
        self.setAccessibleName(self.tr("Presets"))
        self.setMouseTracking(True)
        self.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.verticalScrollBar().valueChanged.connect(lambda _: self.looked.emit())
        self.verticalScrollBar().rangeChanged.connect(lambda _, __: self.looked.emit())
        self.setMinimumWidth(320)

    @property
    def current(self) -> PresetEntry | None:
        """The selected preset, or None."""
        index = self.currentIndex()
        return self.cards.rows[index.row()] if index.isValid() else None

    def visible_cards(self) -> Iterator[PresetEntry]:
        """Yield the selected preset, if any, then the visible ones."""
        if self.current is not None:
            yield self.current
        visible = self.viewport().rect()
        for row, each in enumerate(self.cards.rows):
            if self.visualRect(self.cards.index(row)).intersects(visible):
                yield each


class CostPanel(QWidget):
    """Panel that shows a preset's training time and memory on a chosen GPU; the choice applies to all presets."""

    def __init__(self, outlooks: CostEstimates, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._outlooks = outlooks
        self._shown: tuple[Path, Preset] | None = None
        self.gpus, self.words = ComboBox(), plain_label()
        self.gpus.addItem(self.tr("This PC"), HERE)
        for size in GPU_MEMORY_SIZES:
            self.gpus.addItem(self.tr("GPU with {size} GB").format(size=size), f"{size}GB")
        self.gpus.setCurrentIndex(max(self.gpus.findData(outlooks.gpu), 0))
        self.gpus.setAccessibleName(self.tr("GPU"))
        self.gpus.activated.connect(lambda _: outlooks.choose(self.gpus.currentData()))
        head = QHBoxLayout()
        title = QLabel(self.tr("Time and memory on"))
        title.setProperty("role", "heading")
        head.addWidget(title)
        head.addWidget(self.gpus)
        head.addStretch()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(head)
        column.addWidget(self.words, 0, Qt.AlignmentFlag.AlignTop)
        until_destroyed(self, outlooks.changed.connect(lambda _: self._on_costs_changed()))

    def show_preset(self, path: Path, preset: Preset) -> None:
        """Show the training time and memory of a preset; `path` is its file."""
        self._shown = path, preset
        self.setVisible(preset.recipe is not None)
        self._on_costs_changed()

    def _on_costs_changed(self) -> None:
        self.gpus.setCurrentIndex(max(self.gpus.findData(self._outlooks.gpu), 0))
        if self._shown is not None:
            outlook = self._outlooks.of(*self._shown)
            answer = outlook.answer if outlook else None
            doubtful = outlook is not None and (answer is None or answer.pick is None)
            set_message(self.words, cost_text(outlook, self._outlooks.gpu), "warning" if doubtful else "")


class PresetHeading(QWidget):
    """Heading of a preset: image, name, origin, notes and further details."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.image = QLabel()
        self.image.setAccessibleName(self.tr("Image"))
        self.name, self.maker, self.notes, self.more = (plain_label(role) for role in ("title", "muted", "", "muted"))
        text, row = QVBoxLayout(), QHBoxLayout(self)
        text.setSpacing(6)
        for label in (self.name, self.maker, self.notes, self.more):
            text.addWidget(label)
        text.addStretch()
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(16)
        row.addWidget(self.image, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(text, 1)

    def show_preset(self, preset: Preset, origin: str, image: QPixmap | None) -> None:
        """Show this preset."""
        set_message(self.name, preset.name)
        parts = [NAMES[preset.base.family], author_and_license(preset), origin]
        set_message(self.maker, " · ".join(part for part in parts if part))
        set_message(self.notes, preset.notes)
        words = [
            self.tr("Trigger words: {words}").format(words=", ".join(preset.trigger_words))
            if preset.trigger_words
            else "",
            self.tr("Made for {base}").format(base=preset.base.name) if preset.base.name else "",
            self.tr("Made for a GPU with {size:g} GB").format(size=preset.gpu.gigabytes) if preset.gpu else "",
            self.tr("%n example prompt(s)", "", len(preset.examples)) if preset.examples else "",
        ]
        set_message(self.more, "\n".join(word for word in words if word))
        self.image.setVisible(image is not None)
        if image is not None:
            self.image.setPixmap(image)


class Details(QWidget):
    """Details of the selected preset; the page adds its commands to `buttons`."""

    def __init__(self, outlooks: CostEstimates, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.about = PresetHeading()
        self.outlook = CostPanel(outlooks)
        self.table = Table(
            (self.tr("Setting"), self.tr("Default"), self.tr("With this preset")), self.tr("Preset settings")
        )
        self.heading = QLabel()
        self.heading.setProperty("role", "heading")
        self.buttons = FlowLayout(6)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 18, 20, 12)
        column.setSpacing(14)
        column.addWidget(self.about)
        column.addLayout(self.buttons)
        column.addWidget(self.outlook)
        column.addWidget(self.heading)
        column.addWidget(self.table, 1)

    def show_preset(self, shelved: PresetEntry, image: QPixmap | None) -> None:
        """Show this preset."""
        preset = shelved.preset
        self.about.show_preset(preset, origin_words(shelved.origin), image)
        self.outlook.show_preset(shelved.path, preset)
        set_message(
            self.heading,
            self.tr("Differs from defaults") if preset.recipe else self.tr("Settings that save memory"),
        )
        self.table.show_rows(rows_of(changed_keys(None, preset) if preset.recipe else _fit_keys(preset)))


def rows_of(changes: Sequence[tuple[str, str, str]]) -> list[Row]:
    """Return one table row per changed key, with its documentation as the tooltip."""
    return [_row(*change) for change in changes]


def _row(key: str, before: str, after: str) -> Row:
    """Return one table row. Choices are shown without quotes, as on the Train page; free text keeps its quotes."""
    names = {f'"{choice}"': str(choice) for choice in choices_of(key) if isinstance(choice, str)}
    texts = (full_title(key), names.get(before, before), names.get(after, after))
    return Row(texts, tip=f"{key}\n{doc_of(key)}".strip())


def _fit_keys(preset: Preset) -> list[tuple[str, str, str]]:
    assert preset.fit is not None
    stated = preset.fit.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    planned = QCoreApplication.translate("Presets", "planned")
    return [(key, planned, toml_value(value)) for key, value in flatten(stated, "")]
