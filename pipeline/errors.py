"""What the command line reports in one message; everything else is a fault of its own."""

from __future__ import annotations


class SweepProblem(Exception):
    """Something a person can mend. The text says what, where, and how; ``exit_code`` is the command's."""

    exit_code = 2
