"""The consumer contract passes for a queue of files with visibility timeouts, and finds the faults planted there."""

from __future__ import annotations

from pathlib import Path

import pytest

from idemgate import Gate
from idemgate.testing import ConsumerContract, Transport
from tests.contract.files import FAULTS, FileFault, FileTransport


class TestFiles(ConsumerContract):
    kinds = ("async",)

    @pytest.fixture
    def transport(self, live: Gate, tmp_path: Path) -> Transport:
        return FileTransport(live, tmp_path)


class Impatient(ConsumerContract):
    patience = 3.0


@pytest.mark.slow  # test_contract.py plants the same faults into a quicker transport
@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, names in FAULTS.items() for name in sorted(names)]
)
async def test_a_planted_fault_is_found(fault: FileFault, name: str, live: Gate, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        await getattr(Impatient(), name)(FileTransport(live, tmp_path, fault), "async")
