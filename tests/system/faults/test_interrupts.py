"""Signals that are held back for the length of a block: none is lost, every handler comes back.

In a child, whose handlers are its own and whose thread is the process's first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import pytest

from accel_scaler.optimizer_step import interrupts
from accel_scaler.optimizer_step.interrupts import NUMBERS, Undivided


def in_child(body: Callable[[], object]) -> None:
    """Run it in a fork; a failure there is one here."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            body()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_signal_is_handled_after_the_block() -> None:
    def body() -> None:
        done = []

        def block() -> None:
            with Undivided():
                signal.raise_signal(signal.SIGINT)
                done.append("all of it")

        with pytest.raises(KeyboardInterrupt):
            block()
        assert done == ["all of it"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    in_child(body)


@pytest.mark.parametrize("inner", [nullcontext, Undivided], ids=["alone", "in an inner block"])
def test_a_second_one_is_handled_at_once(inner: Callable[[], AbstractContextManager[Any]]) -> None:
    def body() -> None:
        done = []

        def block() -> None:
            with Undivided():
                signal.raise_signal(signal.SIGINT)
                with inner():
                    signal.raise_signal(signal.SIGINT)
                    done.append("never")

        with pytest.raises(KeyboardInterrupt):
            block()
        assert done == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    in_child(body)


def test_each_handler_gets_its_signal_in_the_order_of_arrival() -> None:
    def body() -> None:
        seen: list[Any] = []
        for number in NUMBERS:
            signal.signal(number, lambda n, frame: seen.append((n, type(frame))))
        with Undivided():
            for number in reversed(NUMBERS):
                signal.raise_signal(number)
            assert seen == []
        assert seen == [(number, FrameType) for number in reversed(NUMBERS)]

    in_child(body)


def test_what_has_no_handler_in_python_is_left_alone() -> None:
    def body() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        before = [signal.getsignal(number) for number in NUMBERS]
        with Undivided():
            assert [signal.getsignal(number) for number in NUMBERS] == before
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(number) for number in NUMBERS] == before

    in_child(body)


def test_a_handler_that_the_block_sets_stays() -> None:
    def mine(number: int, frame: FrameType | None) -> None:
        pass

    def body() -> None:
        with Undivided():
            signal.signal(signal.SIGINT, mine)
        assert signal.getsignal(signal.SIGINT) is mine

    in_child(body)


def test_an_error_of_the_block_comes_out_and_the_interrupt_has_it_as_context() -> None:
    def fails(interrupted: bool) -> None:
        with Undivided():
            if interrupted:
                signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    def body() -> None:
        with pytest.raises(ValueError, match="of the block"):
            fails(False)
        with pytest.raises(KeyboardInterrupt) as caught:
            fails(True)
        assert isinstance(caught.value.__context__, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    in_child(body)


def test_a_block_within_a_block_waits_for_the_outer_one() -> None:
    def body() -> None:
        done = []

        def block() -> None:
            with Undivided():
                with Undivided():
                    signal.raise_signal(signal.SIGINT)
                done.append("the outer one, too")

        with pytest.raises(KeyboardInterrupt):
            block()
        assert done == ["the outer one, too"]

    in_child(body)


def test_on_another_thread_it_does_nothing() -> None:
    seen = []

    def block() -> None:
        with Undivided():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=block)
    thread.start()
    thread.join(30)
    assert seen == [before]


class Told(BaseException):
    pass


def tell(number: int, frame: FrameType | None) -> None:
    raise Told(number)


class At:
    """Raises a signal at one of the lines of the module under test."""

    def __init__(self, number: int, line: int) -> None:
        self.number, self.line, self.count = number, line, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                signal.raise_signal(self.number)
        return self


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_line_of_it_is_handled_once_and_leaves_the_handlers(number: int) -> None:
    """All handlers raise: one may while the others are being put back."""

    def interrupted(line: int) -> bool:
        """False: there are fewer lines."""
        for each in NUMBERS:
            signal.signal(each, tell)
        at, told = At(number, line), 0
        sys.settrace(at)
        try:
            with Undivided():
                pass
        except Told:
            told = 1
        finally:
            sys.settrace(None)
        assert told == int(at.count >= line), line
        assert all(signal.getsignal(each) is tell for each in NUMBERS), line
        assert not Undivided._inside, line
        return bool(told)

    def body() -> None:
        line = 1
        while interrupted(line):
            line += 1
        assert line > 20

    in_child(body)
