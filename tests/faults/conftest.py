"""`bash run_scripts/test.sh --faults` runs all of this; without it a representative part runs."""

from __future__ import annotations

import socket

import pytest
from faults_table import add_row


@pytest.fixture
def injected():
    """``injected(fault, survived, lost=0, bits=0, times=1)`` enters a row of the table.

    ``survived`` of ``times`` runs or files ended as promised; ``lost`` samples were not trained or
    trained twice; ``bits`` of the result differ from an undisturbed run's.
    """

    def add(fault: str, survived: int, lost: int = 0, bits: int = 0, times: int = 1) -> None:
        add_row(fault, times, survived, lost, bits)

    return add


@pytest.fixture
def free_port():
    """A port for the ranks of a run to meet."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
