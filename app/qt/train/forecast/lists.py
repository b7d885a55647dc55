"""Lists in the forecast panel: plans to apply, phases, and problems in the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from PySide6.QtCore import QCoreApplication, QLocale, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.jobs.settings import title_of
from app.core.planning.answer import AnsweredPlan, PlanAnswer, PreflightCheck
from app.qt.theme import colors, set_icon
from app.qt.train import words
from app.qt.train.forecast.charts import KINDS
from app.qt.train.form import to_text
from app.qt.widgets import plain_tip
from trainer.errors import sentence_and_remedy
from trainer.protocol.forecast import Peak

_TITLE = 84
_ICONS = {"error": ("error", "bad"), "warning": ("warning", "warning"), "info": ("info", "muted")}
_SHOWN = 12


def clear(layout: QLayout) -> None:
    """Remove all widgets from a layout; they are deleted after the current event."""
    while (item := layout.takeAt(0)) is not None:
        widget = item.widget()
        if widget is not None:
            widget.hide()
            widget.deleteLater()


class PlanRow(NamedTuple):
    """One plan in the table."""

    title: str
    plan: AnsweredPlan
    note: str
    keys: Mapping[str, Any]
    """Keys and values that the row's button writes into the job."""


class PlanTable(QWidget):
    """Table of plans; emits `applied` with the keys and the title of the plan that the user applies."""

    applied = Signal(object, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: dict[str, QPushButton] = {}
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(8)

    def show_answer(self, answer: PlanAnswer) -> None:
        """Show the plans in an answer."""
        clear(self._column)
        self.buttons.clear()
        for row in self._rows(answer):
            self._column.addWidget(self._line(row, answer))
        if answer.best is not None and not answer.whole:
            waiting = QLabel(self.tr("Computing alternatives…"))
            waiting.setProperty("role", "muted")
            self._column.addWidget(waiting)

    def _rows(self, answer: PlanAnswer) -> Iterator[PlanRow]:
        if answer.pick is not None:
            found = [
                (self.tr("Recommended"), answer.pick, ""),
                (self.tr("Faster"), answer.faster, words.too_large(answer.missing, answer.memory_advice)),
                (self.tr("Uses less memory"), answer.smaller, self.tr("leaves memory for other programs")),
                (self.tr("Quantized"), answer.quantized, ""),
                (self.tr("Not quantized"), answer.streamed, ""),
            ]
            yield from (PlanRow(title, plan, note, plan.keys) for title, plan, note in found if plan is not None)
            return
        if answer.reduced_recipe is not None:
            keys = {f"recipe.{key}": value for key, value in answer.changes.items()}
            changes = ", ".join(f"{title_of(key)} {to_text(value)}" for key, value in keys.items())
            yield PlanRow(
                self.tr("Would fit"), answer.reduced_recipe, self.tr("with {keys}").format(keys=changes), keys
            )
        if answer.smaller is not None:
            yield PlanRow(
                self.tr("Smallest"), answer.smaller, words.too_large(answer.missing, answer.memory_advice), {}
            )

    def _line(self, row: PlanRow, answer: PlanAnswer) -> QWidget:
        line = QFrame()
        title, figures = QLabel(row.title), QLabel(self._figures(row.plan))
        title.setProperty("role", "heading")
        figures.setTextFormat(Qt.TextFormat.PlainText)
        title.setMinimumWidth(_TITLE)
        head = QHBoxLayout()
        head.addWidget(title)
        head.addWidget(figures, 1)
        if row.keys:
            head.addWidget(self._button(row))
        parts = [words.fit(row.plan.fit, answer.effective_batch), words.cost(row.plan), row.note]
        how = QLabel("; ".join(text for text in parts if text))
        how.setTextFormat(Qt.TextFormat.PlainText)
        how.setWordWrap(True)
        how.setProperty("role", "muted")
        column = QVBoxLayout(line)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(head)
        column.addWidget(how)
        return line

    def _figures(self, plan: AnsweredPlan) -> str:
        return f"{words.format_duration(plan.forecast.seconds)} · {words.format_memory(plan.needed)}"

    def _button(self, row: PlanRow) -> QPushButton:
        from trainer.config.toml_file import toml_value  # imported late: the schema takes 0.2 s

        button = self.buttons[row.title] = QPushButton(self.tr("Use"))
        button.setAccessibleName(self.tr("Use this plan: {plan}").format(plan=row.title))
        keys = ", ".join(f"{key} = {toml_value(value)}" for key, value in row.keys.items())
        button.setToolTip(self.tr("Writes into the job: {keys}").format(keys=keys))
        button.clicked.connect(lambda: self.applied.emit(row.keys, row.title))
        return button


class ShareBar(QWidget):
    """Thin bar that is filled to a fraction of its width with a color role."""

    def __init__(self, share: float, color: str = "series3", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._share, self._color = share, color
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def set_share(self, share: float) -> None:
        """Fill another fraction of the bar."""
        self._share = share
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a small size, about as high as a lowercase letter."""
        return QSize(60, 10)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the background and the filled part."""
        now, painter = colors(), QPainter(self)
        painter.fillRect(self.rect(), QColor(now.base))
        if self._share:
            filled = QRectF(0, 0, max(self.width() * self._share, 2), self.height())
            painter.fillRect(filled, QColor(getattr(now, self._color)))


class KindTable(QWidget):
    """Table of what holds the memory at a peak: the size of each kind of memory, and the largest parts."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(self.tr("Memory at this peak, by kind"))
        self.sizes: dict[str, QLabel] = {}
        """Label with the size of each kind."""
        self.largest = QLabel()
        self._bars: dict[str, ShareBar] = {}
        self._shares: dict[str, QLabel] = {}
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(3)
        grid.setColumnStretch(1, 1)
        for row, (kind, color) in enumerate(KINDS.items()):
            bar, size, share = ShareBar(0.0, color), QLabel(), QLabel()
            self._bars[kind], self.sizes[kind], self._shares[kind] = bar, size, share
            share.setProperty("role", "muted")
            for column, part in enumerate((QLabel(words.kind_name(kind)), bar, size, share)):
                side = Qt.AlignmentFlag.AlignRight if column > 1 else Qt.AlignmentFlag(0)
                grid.addWidget(part, row, column, side | Qt.AlignmentFlag.AlignVCenter)
        self.largest.setTextFormat(Qt.TextFormat.PlainText)
        self.largest.setWordWrap(True)
        self.largest.setProperty("role", "muted")
        # Room for the longest text, so that what is below does not move while the pointer goes from peak to peak.
        self.largest.setMinimumHeight(self.largest.fontMetrics().lineSpacing() * 3)
        self.largest.setAlignment(Qt.AlignmentFlag.AlignTop)
        grid.addWidget(self.largest, len(KINDS), 0, 1, 4)

    def show_peak(self, peak: Peak | None) -> None:
        """Show a peak's memory; hide the table for None."""
        self.setVisible(peak is not None)
        if peak is None:
            return
        whole = sum(peak.by_kind.values()) or 1
        for kind, label in self.sizes.items():
            size = peak.by_kind.get(kind, 0)
            label.setText(words.format_memory(size) if size else "–")
            self._shares[kind].setText(QLocale().toString(100 * size / whole, "f", 1) + "%" if size else "")
            self._bars[kind].set_share(size / whole)
        parts = [f"{words.part_name(module)} {words.format_memory(size)}" for module, size in peak.largest]
        self.largest.setText(self.tr("Largest parts: {parts}").format(parts=", ".join(parts)) if parts else "")


class PhaseTable(QWidget):
    """Table of a plan's phases, with their time and memory."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(3)
        self._grid.setColumnStretch(2, 1)

    def show_plan(self, plan: AnsweredPlan) -> None:
        """Show a plan's phases."""
        clear(self._grid)
        whole, on_cpu = plan.forecast.seconds or 1.0, plan.forecast.on_cpu
        for row, phase in enumerate(plan.forecast.phases):
            decides = not on_cpu and phase is plan.decisive
            number, name = QLabel(str(row + 1)), QLabel(words.phase_name(phase.phase))
            number.setProperty("role", "muted")
            name.setProperty("role", "heading" if decides else "")
            time = QLabel(words.format_duration(phase.seconds) if phase.seconds >= 0.5 else self.tr("under 1 s"))
            memory = QLabel(words.format_memory(phase.host if on_cpu else plan.reserved(phase.reserved)))
            if decides:
                memory.setProperty("role", "heading")
                memory.setToolTip(self.tr("This phase needs the most memory."))
            for column, part in enumerate((number, name, ShareBar(phase.seconds / whole), time, memory)):
                side = Qt.AlignmentFlag.AlignRight if column in (0, 3, 4) else Qt.AlignmentFlag(0)
                self._grid.addWidget(part, row, column, side | Qt.AlignmentFlag.AlignVCenter)


class PreflightList(QWidget):
    """List of problems and remarks; emits `wanted` with the key of the setting that the user wants to see."""

    wanted = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.checks: Sequence[PreflightCheck] = ()
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)

    def show_checks(self, checks: Sequence[PreflightCheck]) -> None:
        """Show these checks, which must be sorted by severity, the worst first."""
        if checks == self.checks and self._column.count():
            return
        self.checks = checks
        clear(self._column)
        if not checks:
            fine = QLabel(self.tr("Ready to train."))
            fine.setProperty("role", "good")
            self._column.addWidget(fine)
        for check in checks[:_SHOWN]:
            self._column.addWidget(self._line(check))
        if len(checks) > _SHOWN:
            more = QLabel(self.tr("and %n more", "", len(checks) - _SHOWN))
            more.setProperty("role", "muted")
            self._column.addWidget(more)

    def _line(self, check: PreflightCheck) -> QWidget:
        line, mark = QWidget(), QToolButton()
        name, role = _ICONS[check.severity]
        set_icon(mark, name, role)
        mark.setIconSize(QSize(18, 18))
        mark.setAutoRaise(True)
        mark.setEnabled(True)
        if check.key:
            mark.setToolTip(self.tr("Go to {setting}").format(setting=check.title))
            mark.setAccessibleName(mark.toolTip())
            mark.clicked.connect(lambda: self.wanted.emit(check.key))
        else:
            mark.setFocusPolicy(Qt.FocusPolicy.NoFocus)
            mark.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        remedy = QCoreApplication.translate("Preflight", check.remedy) if check.remedy else ""
        text = QLabel(sentence_and_remedy(_sentence(check), remedy))
        text.setToolTip(plain_tip(check.key))
        text.setTextFormat(Qt.TextFormat.PlainText)
        text.setWordWrap(True)
        row = QHBoxLayout(line)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(mark, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(text, 1)
        return line


def _sentence(check: PreflightCheck) -> str:
    """Return a check's sentence; if the check is about a setting, its title comes first: "Rank: must be ..."."""
    if check.remark is not None:
        return words.remark(check.remark)
    sentence = check.sentence
    if not check.key or not sentence:
        return sentence
    plain = sentence[1:2].islower()  # not a name such as SDXL
    return f"{check.title}: {sentence[:1].lower() if plain else sentence[:1]}{sentence[1:]}"
