"""Work on many files by processes: each answer at its place, and none is lost where a process is."""

from __future__ import annotations

import os

from ckptctl.operations.checks import forked


def test_answers_come_in_order_from_several_processes():
    told = forked.each(lambda i: (i, os.getpid()), 100, jobs=3)
    assert [i for i, _ in told] == list(range(100))
    assert len({process for _, process in told}) == 3


def test_few_pieces_of_work_are_done_here():
    assert {process for _, process in (forked.each(lambda i: (i, os.getpid()), 20, jobs=4))} == {os.getpid()}


def test_the_work_of_a_process_that_dies_is_done_here():
    here = os.getpid()

    def work(i):
        if os.getpid() != here and i > 50:
            os._exit(3)
        return i

    assert forked.each(work, 100, jobs=2) == list(range(100))
