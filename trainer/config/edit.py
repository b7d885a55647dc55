"""Change the values in a TOML text and keep the rest: comments, blank lines, key order and number formats.

The text is split into lines, each with the path of its key or table. Lines are then changed, removed or inserted, so a
mistake can only misplace a line. The result is parsed again, and returned only if it contains exactly the requested
values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from trainer.config.toml_file import is_table, table_lines, toml_key, toml_value
from trainer.protocol.reading import TOML_TEXT_OR_COMMENT, UnusableFileError, parse_toml

if TYPE_CHECKING:
    from tomlkit.container import Container
    from tomlkit.items import Item

LONGEST = 32 * 1024
"""Longest text that is edited, in characters: twice as long as a new job. The worst case takes about a second."""
_MOST_DOTS = 2_000  # in keys and numbers; tomlkit copies the tables of each dotted key several times
_MOST_COMPARISONS = 10_000  # of list items with each other: about 10 ms
_MISSING = object()
_LITERAL = re.compile(r"[^'\x00-\x08\x0a-\x1f\x7f]*")
_log = logging.getLogger(__name__)

KeyPath: TypeAlias = tuple[str | int, ...]
"""Place of a value: the names of its tables, with an index after the name of a list of tables, then its own name."""


def edit_toml(text: str, values: Mapping[str, Any], renamed_keys: Mapping[str, str] | None = None) -> str | None:
    """Return `text` with exactly these values; None if that is not possible, or the text is invalid or too long.

    New keys are placed in the order of `values`. Removing a key also removes the comment on its line, and removing an
    item of a list of tables also removes the comments inside it and directly above it. `renamed_keys` maps the former
    dotted name of each renamed key to the last part of its new name; the lines of renamed keys stay where they are.
    """
    if len(text) > LONGEST or TOML_TEXT_OR_COMMENT.sub("", text).count(".") > _MOST_DOTS:
        return None
    body, mark = text.removeprefix("\ufeff"), "\ufeff" * text.startswith("\ufeff")
    try:
        if _are_same(parse_toml(body, finite=False), values):
            return text
        edited = _edit(body, values, renamed_keys or {})
        if edited is not None and _are_same(parse_toml(edited, finite=False), values):
            return mark + edited
    except UnusableFileError:
        return None
    except Exception:  # noqa: BLE001 - tomlkit fails in many ways; the caller writes the values without comments
        _log.info("Could not keep the comments of a TOML file.", exc_info=True)
    return None


def _edit(text: str, values: Mapping[str, Any], renamed_keys: Mapping[str, str]) -> str | None:
    """Return the text with these values; None if tomlkit does not reproduce the unchanged text."""
    lines = _parsed(text)
    if "".join(line.text for line in lines) != text:
        return None
    edit = _Edit(lines, values, "\r\n" if "\r\n" in text else "\n")
    edit.rename(renamed_keys)
    edit.arrange_lists()
    edit.update()
    edit.insert_missing(values, ())
    return "".join(line.text for line in edit.lines)


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of equal types, inside tables and lists too; NaN equals itself."""
    if isinstance(one, dict) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


# --- lines


@dataclass(slots=True, eq=False)
class _Line:
    """A key with its value, a table header, or (with an empty path) a comment or blank line."""

    end: str
    """Comment and line break after the value or header; the whole text of other lines."""
    path: KeyPath = ()
    section: int = 0
    """Number of leading parts of `path` that come from the nearest header above."""
    value: Item | None = None
    indent: str = ""
    name: str = ""
    sign: str = ""
    """Text between name and value, or the brackets after the name of a header."""

    @property
    def text(self) -> str:
        """Return the text of the line."""
        return self.indent + self.name + self.sign + ("" if self.value is None else self.value.as_string()) + self.end

    @property
    def is_header(self) -> bool:
        """Return whether the line begins a table."""
        return bool(self.path) and self.value is None

    @property
    def is_key(self) -> bool:
        """Return whether the line is a key with its value."""
        return self.value is not None

    @property
    def is_comment(self) -> bool:
        """Return whether the line contains only a comment."""
        return not self.path and not self.is_blank

    @property
    def is_blank(self) -> bool:
        """Return whether the line is empty."""
        return not self.path and not self.end.strip()

    def is_under(self, path: KeyPath) -> bool:
        """Return whether the line's path is this path or inside it; False for comments and blank lines."""
        return len(self.path) >= len(path) and self.path[: len(path)] == path and bool(self.path)


def _parsed(text: str) -> list[_Line]:
    """Return the lines of a TOML text; a value that spans several lines is one line."""
    import tomlkit  # imported here: takes 30 ms, and only workers that save a changed job need it

    return list(_lines(tomlkit.parse(text), (), 0, ""))


def _lines(table: Container, path: KeyPath, section: int, prefix: str) -> Iterator[_Line]:
    """Yield the lines of a table in the order of the text; `prefix` precedes its keys if they are dotted."""
    from tomlkit.items import AoT, Table

    for key, item in table.body:
        if key is None:
            yield from map(_Line, item.as_string().splitlines(keepends=True))
            continue
        here, trivia = (*path, key.key), item.trivia
        if isinstance(item, AoT):
            for number, each in enumerate(item.body):
                yield _header(each, (*here, number), "[[", "]]")
                yield from _lines(each.value, (*here, number), len(here) + 1, "")
        elif not isinstance(item, Table):
            end = f"{trivia.comment_ws}{trivia.comment}{trivia.trail}"
            yield _Line(end, here, section, item, trivia.indent, prefix + key.as_string(), key.sep)
        elif key.is_dotted():
            yield from _lines(item.value, here, section, f"{prefix}{key.as_string()}.")
        else:
            if not item.is_super_table():  # a super table has no header, only tables inside it have
                yield _header(item, here, "[", "]")
            yield from _lines(item.value, here, len(here), "")


def _header(table: Any, path: KeyPath, opening: str, closing: str) -> _Line:
    trivia = table.trivia
    end = f"{trivia.comment_ws}{trivia.comment}{trivia.trail}"
    return _Line(end, path, 0, None, trivia.indent + opening, table.display_name or _dotted(path), closing)


def _names(path: KeyPath) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))


def _dotted(path: KeyPath) -> str:
    return ".".join(map(toml_key, _names(path)))


# --- values


def _at(values: Any, path: KeyPath) -> Any:
    """Return the value at a path, or `_MISSING`."""
    for part in path:
        if isinstance(part, str):
            values = values.get(part, _MISSING) if isinstance(values, dict) else _MISSING
        else:
            values = values[part] if isinstance(values, list) and part < len(values) else _MISSING
    return values


def _updated(item: Item, value: Any) -> Item:
    """Return a tomlkit value changed to `value`; unchanged parts keep their notation."""
    import tomlkit
    from tomlkit.items import Array, InlineTable, String

    if _are_same(item.unwrap(), value):
        return item
    if isinstance(item, InlineTable) and isinstance(value, dict):
        for name in [name for name in item if name not in value]:
            del item[name]
        for name, each in value.items():
            item[name] = _updated(cast("Item", item.value.item(name)), each) if name in item else _new(each)
        return item
    if isinstance(item, Array) and isinstance(value, list) and len(item) * len(value) <= _MOST_COMPARISONS:
        _update_array(item, value)
        return item
    is_literal = isinstance(item, String) and item.as_string().startswith("'")  # the usual notation of Windows paths
    if is_literal and isinstance(value, str) and _LITERAL.fullmatch(value):
        return tomlkit.value(f"'{value}'")
    return _new(value)


def _is_editable(item: Item, value: Any) -> bool:
    """Return whether a tomlkit value can be changed to `value` in place; a new table needs its own header instead."""
    old = item.unwrap()
    is_inline = isinstance(old, dict) or (isinstance(old, list) and bool(old))
    return value is not _MISSING and (is_inline or not is_table(value))


def _new(value: Any) -> Item:
    import tomlkit

    return tomlkit.value(toml_value(value))


def _update_array(array: Any, value: list[Any]) -> None:
    """Change a tomlkit array to `value` from its end, so that the indices of the rest stay valid."""
    before, after = [toml_value(each) for each in array.unwrap()], [toml_value(each) for each in value]
    for _, start, end, new_start, new_end in reversed(SequenceMatcher(None, before, after, False).get_opcodes()):
        common = min(end - start, new_end - new_start)
        for index in range(end - 1, start + common - 1, -1):
            del array[index]
        for index in range(new_start + common, new_end):
            array.insert(start + index - new_start, _new(value[index]))
        for index in range(common):
            array[start + index] = _updated(list.__getitem__(array, start + index), value[new_start + index])


# --- editing


@dataclass(slots=True)
class _Block:
    """The lines of one item of a list of tables."""

    blanks: list[_Line]
    """Blank lines above it."""
    lines: list[_Line]
    """Comments directly above it, its header and its keys, with the comments between and directly below them."""
    rest: list[_Line]
    """Comments below it, after a blank line: they stay when the item is removed."""


class _Edit:
    """An edit in progress: the lines of a text, which are being changed to contain `values`."""

    def __init__(self, lines: list[_Line], values: Mapping[str, Any], newline: str) -> None:
        self.lines = lines
        self._values = values
        self._newline = newline
        headers = [index for index, line in enumerate(lines) if line.is_header and index]
        self._has_gaps = not headers or any(lines[self._top(index) - 1].is_blank for index in headers)
        """Whether the text has blank lines above table headers."""
        self._stated: set[KeyPath] = set()
        self._whole: set[KeyPath] = set()

    def rename(self, renamed_keys: Mapping[str, str]) -> None:
        """Rename the keys in the lines if `values` contains their new names instead of the former ones."""
        wanted, present = set(_all_names(self._values, ())), {_names(line.path) for line in self.lines}
        present |= {names[:size] for names in present for size in range(len(names))}
        for line in self.lines:
            former: list[str] = []
            path: list[str | int] = []
            for part in line.path:
                if isinstance(part, str):
                    former.append(part)
                    table = _names(tuple(path))
                    name = renamed_keys.get(".".join(former), part)
                    if (*table, part) not in wanted and (*table, name) in wanted and (*table, name) not in present:
                        part = name
                path.append(part)
            if tuple(path) != line.path:
                line.path = tuple(path)
                spaces = line.name[len(line.name.rstrip()) :]
                line.name = _dotted(line.path[line.section :]) + spaces

    def arrange_lists(self) -> None:
        """Put the items of each list of tables into the order of `values`, and insert its new items."""
        for path in dict.fromkeys(line.path[:-1] for line in self.lines if _is_item(line)):
            value = _at(self._values, path)
            self._arrange_list(path, value if isinstance(value, list) and is_table(value) else [])

    def _arrange_list(self, path: KeyPath, wanted: list[Any]) -> None:
        start, end, blocks = self._blocks(path)
        old = [_stated(block.lines, len(path) + 1) for block in blocks]
        numbers = _matches(old, wanted)
        gaps = [block.blanks for block in blocks]
        gaps += [gaps[-1] if len(gaps) > 1 else self._gap()] * max(0, len(wanted) - len(gaps))
        arranged = [] if wanted else [line for block in blocks for line in block.rest]
        for index, (value, number) in enumerate(zip(wanted, numbers, strict=True)):
            arranged += [_Line(line.end) for line in gaps[index]]
            if number is None:
                arranged += self._table((*path, index), value)
            else:
                for line in (lines := blocks[number].lines):
                    if line.path:
                        line.path = (*path, index, *line.path[len(path) + 1 :])
                arranged += [*lines, *blocks[number].rest]
            _end_line(arranged, self._newline)
            if index == len(wanted) - 1:
                unused = [block.rest for each, block in enumerate(blocks) if each not in numbers]
                arranged += [line for rest in unused for line in rest]
        self.lines[start:end] = arranged
        if start and arranged:
            _end_line(self.lines[:start], self._newline)

    def _blocks(self, path: KeyPath) -> tuple[int, int, list[_Block]]:
        """Return the start and end of a list of tables in the lines, and its items."""
        headers = [index for index, line in enumerate(self.lines) if _is_item(line) and line.path[:-1] == path]
        last = max(index for index, line in enumerate(self.lines) if line.is_under(path))
        tops = [self._top(index) for index in headers]
        starts = [self._above_blanks(top) for top in tops]
        ends = [*starts[1:], self._section_end(last)]
        blocks = []
        for top, start, end in zip(tops, starts, ends, strict=True):
            split = self._section_end(max(index for index in range(top, end) if self.lines[index].path))
            split = min(split, end)
            blocks.append(_Block(self.lines[start:top], self.lines[top:split], self.lines[split:end]))
        return starts[0], ends[-1], blocks

    def update(self) -> None:
        """Change the values of keys, and remove the keys and headers that `values` does not contain."""
        kept: list[_Line] = []
        is_joint = False  # whether a line was removed here, so that blank lines above and below it meet
        for line in self.lines:
            value = _at(self._values, line.path) if line.path else None
            if line.value is not None and _is_editable(line.value, value):
                line.value = _updated(line.value, value)
            elif line.is_key or (line.is_header and not isinstance(value, dict)):
                is_joint = True
                continue
            elif is_joint and line.is_blank and (not kept or kept[-1].is_blank):
                continue
            is_joint = False
            kept.append(line)
        while is_joint and kept and kept[-1].is_blank:
            kept.pop()
        self.lines = kept

    def insert_missing(self, table: Mapping[str, Any], path: KeyPath) -> None:
        """Insert the keys and tables of `values` that are missing from the lines."""
        if not path:  # the lines that are inserted state nothing that is still missing
            self._stated = {line.path[:size] for line in self.lines for size in range(1, len(line.path) + 1)}
            self._whole = {line.path for line in self.lines if line.is_key}
        names = list(table)
        for index, (name, value) in enumerate(table.items()):
            here = (*path, name)
            if here in self._whole:
                continue
            if here not in self._stated:
                before = [(*path, each) for each in reversed(names[:index])]
                self._insert_tables(here, value, before) if is_table(value) else self._insert_key(here, value, before)
            elif isinstance(value, dict):
                self.insert_missing(value, here)
            elif isinstance(value, list):
                for number, item in enumerate(value):
                    self.insert_missing(item, (*here, number))

    def _insert_key(self, path: KeyPath, value: Any, before: Sequence[KeyPath]) -> None:
        """Insert a key below the first key in `before` that exists, or at the top of its table if none exists."""
        *table, name = path
        keys = {line.path: index for index, line in enumerate(self.lines) if line.is_key}
        previous = next((keys[each] for each in before if each in keys), None)
        gap: list[_Line] = []
        if previous is not None:
            like, place = self.lines[previous], previous + 1
        elif (header := self._find(lambda line: line.is_header and line.path == path[:-1])) is not None:
            like, place = _Line("", section=len(table), indent=self.lines[header].indent.rstrip("[")), header + 1
        elif (following := self._find(lambda line: _is_dotted_in(path[:-1], line))) is not None:
            like, place = self.lines[following], self._top(following)
        else:
            first = self._find(lambda line: line.is_header and line.is_under(path[:-1]))
            if table and first is not None:  # only its tables have headers
                lines = [*self._gap(), *self._table(path[:-1], {str(name): value})]
                self._insert(self._above_blanks(self._top(first)), lines)
                return
            like, place = _Line(""), len(self.lines) if first is None else self._top(first)
            gap = [] if first is None else self._gap()
        line = _Line(self._newline, path, like.section, _new(value), like.indent, "", " = ")
        line.name = _dotted(path[line.section :])
        self._insert(place, [line, *gap])

    def _insert_tables(self, path: KeyPath, value: Any, before: Sequence[KeyPath]) -> None:
        """Insert a table or a list of tables below the first table or key in `before` that exists."""
        table = path[:-1]
        places = {line.path[: len(path)]: index for index, line in enumerate(self.lines) if line.is_under(table)}
        previous = next((places[each] for each in before if each in places), None)
        if previous is None:
            previous = self._find(lambda line: line.is_header and line.path == table)
        if previous is not None:
            place = self._section_end(previous)
        else:
            first = self._find(lambda line: line.is_header and line.is_under(table))
            place = len(self.lines) if first is None else self._above_blanks(self._top(first))
        added: list[_Line] = []
        for number, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            gap = self._gap() if added or any(line.path for line in self.lines[:place]) else []
            added += [*gap, *self._table(path if number is None else (*path, number), item)]
        self._insert(place, added)

    # --- places in the lines

    def _find(self, matches: Callable[[_Line], bool]) -> int | None:
        return next((index for index, line in enumerate(self.lines) if matches(line)), None)

    def _top(self, index: int) -> int:
        """Return the index of the first comment line directly above a line, or the line's own index if there is none.

        Comments that begin at the top of the text do not count, because they describe the whole file.
        """
        top = index
        while top and self.lines[top - 1].is_comment:
            top -= 1
        return top if top else index

    def _above_blanks(self, index: int) -> int:
        while index and self.lines[index - 1].is_blank:
            index -= 1
        return index

    def _section_end(self, index: int) -> int:
        """Return the end of the table that contains a line: after its last key and the comments directly below it."""
        end = index + 1
        for number in range(index + 1, len(self.lines)):
            if self.lines[number].is_header:
                break
            if self.lines[number].is_key:
                end = number + 1
        below = end
        while below < len(self.lines) and self.lines[below].is_comment:
            below += 1
        is_header_next = below < len(self.lines) and self.lines[below].is_header
        return end if is_header_next else below

    def _gap(self) -> list[_Line]:
        return [_Line(self._newline)] if self._has_gaps else []

    def _table(self, path: KeyPath, table: Mapping[str, Any]) -> list[_Line]:
        """Return the lines of a new table, or of an item of a list if the path ends with an index."""
        name = _dotted(path)
        header = f"[[{name}]]" if isinstance(path[-1], int) else f"[{name}]"
        text = "\n".join([header, *table_lines(table, f"{name}.")]) + "\n"
        lines = _parsed(text.replace("\n", self._newline))
        first = lines[0].path
        for line in lines:
            if line.path:
                line.path = (*path, *line.path[len(first) :])
                line.section += (len(path) - len(first)) * line.is_key
        return lines

    def _insert(self, place: int, lines: list[_Line]) -> None:
        _end_line(self.lines[:place], self._newline)
        self.lines[place:place] = lines


def _end_line(lines: Sequence[_Line], newline: str) -> None:
    """End the last line of a text with a line break if it has none."""
    if lines and not lines[-1].end.endswith("\n"):
        lines[-1].end += newline


def _is_dotted_in(table: KeyPath, line: _Line) -> bool:
    """Return whether a line sets a key of this table or of a table inside it.

    The line is under the table's own header, or contains a dotted key under the header of a parent table.
    """
    return line.is_key and line.is_under(table) and line.section <= len(table)


def _is_item(line: _Line) -> bool:
    """Return whether a line begins an item of a list of tables that is not itself inside such a list."""
    return line.is_header and isinstance(line.path[-1], int) and len(_names(line.path)) == len(line.path) - 1


def _stated(lines: Sequence[_Line], size: int) -> dict[str, Any]:
    """Return the values that are set in the lines of an item, by their dotted keys within the item."""
    stated: dict[str, Any] = {}
    for line in lines:
        if line.value is not None:
            stated |= dict(_leaves(line.value.unwrap(), ".".join(map(str, line.path[size:]))))
    return stated


def _all_names(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names of all tables and values inside a value, without indices."""
    if isinstance(value, list):
        for item in value:
            yield from _all_names(item, path)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield (*path, name)
            yield from _all_names(inner, (*path, name))


def _matches(old: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[int | None]:
    """Return for each wanted item the index of the old item to change into it; None if the item is new.

    Equal items are matched first, then those with the most equal values, then the rest in order.
    """
    new = [dict(_leaves(item, "")) for item in wanted]
    found: list[int | None] = [None] * len(new)
    equal: dict[str, list[int]] = {}
    for number, item in reversed(list(enumerate(old))):
        equal.setdefault(_fingerprint(item), []).append(number)
    for index, item in enumerate(new):
        if numbers := equal.get(_fingerprint(item)):
            found[index] = numbers.pop()
    free = sorted(number for numbers in equal.values() for number in numbers)
    rest = [index for index, number in enumerate(found) if number is None]
    if len(rest) * len(free) <= _MOST_COMPARISONS:
        scores = [(-_likeness(old[number], new[index]), index, number) for index in rest for number in free]
        for score, index, number in sorted(scores):
            if score and found[index] is None and number in free:
                found[index] = number
                free.remove(number)
    for index in rest:
        if found[index] is None and free:
            found[index] = free.pop(0)
    return found


def _fingerprint(item: Mapping[str, Any]) -> str:
    return repr(sorted(item.items(), key=lambda each: each[0]))


def _likeness(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(key in other and _are_same(value, other[key]) for key, value in one.items())


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values inside a table or a list of tables by their dotted keys."""
    if is_table(value):
        items = enumerate(value) if isinstance(value, list) else value.items()
        for name, inner in items:
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value
