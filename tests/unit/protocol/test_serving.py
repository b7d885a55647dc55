"""What every `--serve` has in common: lines in, lines out, the newest wins, and what happens when nothing is asked."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.errors import ImpastoError
from trainer.protocol.processes import ActiveRequest, Answer, Server


class Heard(io.StringIO):
    """What a server says, and a function to be called for each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[dict[str, Any]] = []
        self.on_answer: Callable[[dict[str, Any]], None] = lambda _: None

    def write(self, text: str) -> int:
        self.answers.append(json.loads(text))
        self.on_answer(self.answers[-1])
        return len(text)


def server(work: Callable[[ActiveRequest], Answer], heard: Heard, **settings: Any) -> Server:
    return Server(
        work, lambda request: "it is bad" if "bad" in request else None, heard, code="a.b", guide="c", **settings
    )


def test_answers_carry_their_ids_and_what_is_no_request_is_said() -> None:
    def work(turn: ActiveRequest) -> Answer:
        if turn.request["id"] == "ß":
            raise ImpastoError("x.y", "Why.", "What to do.")
        turn.report_progress("under way", how=1)
        return {"found": turn.request["n"]}

    heard = Heard()
    lines = ['{"id": 1, "n": 5}\n', "\n", "rubbish\n", "[]\n", '{"n": 1}\n', '{"id": 7, "bad": 1}\n', '{"id": "ß"}\n']

    def one_by_one() -> Iterator[str]:
        for line in lines:
            answered = threading.Event()
            heard.on_answer = lambda answer, done=answered: done.set() if answer["state"] in ("done", "error") else None  # type: ignore[misc]
            yield line
            assert line == "\n" or answered.wait(60)

    server(work, heard).run(one_by_one())
    assert heard.answers[:2] == [{"id": 1, "state": "under way", "how": 1}, {"id": 1, "state": "done", "found": 5}]
    assert heard.answers[-1] == {
        "id": "ß",
        "state": "error",
        "code": "x.y",
        "sentence": "Why.",
        "remedy": "What to do.",
        "problems": [],
    }
    refused = heard.answers[2:-1]
    assert [(answer["id"], answer["code"]) for answer in refused] == [(None, "a.b")] * 3 + [(7, "a.b")]
    assert [answer["sentence"].partition("request: ")[2][:12] for answer in refused] == [
        "it is not va", "it is not a ", 'it has no "i', "it is bad.",
    ]  # fmt: skip


def test_the_newest_wins_before_and_while_it_is_worked_on() -> None:
    heard, begun, more = Heard(), threading.Event(), threading.Event()

    def work(turn: ActiveRequest) -> Answer:
        if turn.request["id"] == 1:
            begun.set()
            assert more.wait(60)
            turn.raise_if_overtaken()
            raise AssertionError("it went on")
        return {}

    def lines() -> Iterator[str]:
        yield '{"id": 1}'
        assert begun.wait(60)
        yield '{"id": 2}'
        yield '{"id": 3}'
        more.set()

    server(work, heard).run(lines())
    assert heard.answers == [
        {"id": 1, "state": "cancelled"},
        {"id": 2, "state": "cancelled"},
        {"id": 3, "state": "done"},
    ]


def test_what_is_worked_on_when_the_input_ends_is_finished() -> None:
    """As in `echo '{...}' | python -m trainer plan --serve`: the end of the input is no other request."""
    before = set(threading.enumerate())

    def work(turn: ActiveRequest) -> Answer:
        for reader in set(threading.enumerate()) - before:  # if it has not come to the end already
            reader.join(60)
        turn.raise_if_overtaken()
        return {}

    heard = Heard()
    server(work, heard).run(iter(['{"id": 1}\n']))
    assert heard.answers == [{"id": 1, "state": "done"}]


def test_what_a_disk_refuses_is_told_and_the_next_request_answered() -> None:
    def work(turn: ActiveRequest) -> Answer:
        if turn.request["id"] == 1:
            Path("x" * 50_000).stat()
        return {}

    heard, refused = Heard(), threading.Event()
    heard.on_answer = lambda _: refused.set()

    def lines() -> Iterator[str]:
        yield '{"id": 1}'
        assert refused.wait(60)
        yield '{"id": 2}'

    server(work, heard).run(lines())
    assert [(answer["id"], answer["state"]) for answer in heard.answers] == [(1, "error"), (2, "done")]
    assert heard.answers[0]["code"] == "file.refused"
    assert len(heard.answers[0]["sentence"]) < 500


def test_nothing_asked_for_a_while_is_told_once_and_requests_are_answered_after() -> None:
    heard, idle, told = Heard(), threading.Event(), []

    def on_idle() -> None:
        told.append(1)
        idle.set()

    def lines() -> Iterator[str]:
        assert idle.wait(60)
        yield '{"id": 1}'

    server(lambda turn: {}, heard, idle=0.01, on_idle=on_idle).run(lines())
    assert heard.answers == [{"id": 1, "state": "done"}] and told
