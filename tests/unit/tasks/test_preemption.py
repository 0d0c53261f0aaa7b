"""SIGTERM inside a step: the step may finish within its grace, is given up after it, and at once on a second word."""

import os
import signal
import threading
import time

import pytest
from prefect.exceptions import TerminationSignal

from tasks.preemption import unhurried

HANG_S = 60.0


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_step_that_ends_within_the_grace_is_finished_first():
    finished = []
    with pytest.raises(TerminationSignal), unhurried(HANG_S):
        terminate()
        time.sleep(0.1)
        finished.append("committed")
    assert finished == ["committed"]


def test_a_step_that_takes_longer_is_given_up():
    began = time.monotonic()
    with pytest.raises(TerminationSignal), unhurried(0.2):
        terminate()
        time.sleep(HANG_S)
    assert time.monotonic() - began < HANG_S / 2


def test_a_second_signal_ends_the_step_at_once():
    began = time.monotonic()
    with pytest.raises(TerminationSignal), unhurried(HANG_S):
        terminate()
        terminate()
        time.sleep(HANG_S)
    assert time.monotonic() - began < HANG_S / 2


def test_without_a_signal_nothing_happens_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with unhurried(HANG_S):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_grace_or_outside_of_the_main_thread_the_signal_is_left_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []
    with unhurried(0.0):
        seen.append(signal.getsignal(signal.SIGTERM))

    def elsewhere() -> None:
        with unhurried(HANG_S):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before, before]
