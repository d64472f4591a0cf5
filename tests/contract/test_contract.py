"""The consumer contract passes for a correct consumer, and each planted fault of a consumer fails it."""

from __future__ import annotations

import pytest

from idemgate import Gate
from idemgate.testing import ConsumerContract, Transport
from tests.contract.files import FAULTS as FILE_FAULTS
from tests.contract.memory import FAULTS, Fault, MemoryTransport, OrderedTransport

NAMES = [name for name in vars(ConsumerContract) if name.startswith("test_")]


class TestMemory(ConsumerContract):
    kinds = ("async",)

    @pytest.fixture
    def transport(self, live: Gate) -> Transport:
        return MemoryTransport(live)


class TestOrdered(ConsumerContract):
    kinds = ("async",)

    @pytest.fixture
    def transport(self, live: Gate) -> Transport:
        return OrderedTransport(live)


class Impatient(ConsumerContract):
    patience = 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, names in FAULTS.items() for name in sorted(names)]
)
async def test_a_planted_fault_is_found(fault: Fault, name: str, live: Gate) -> None:
    with pytest.raises(AssertionError):
        transport = OrderedTransport if fault == "passed by a retry" else MemoryTransport
        await getattr(Impatient(), name)(transport(live, fault), "async")


def test_each_test_finds_a_fault() -> None:
    assert set.union(*FAULTS.values(), *FILE_FAULTS.values()) == set(NAMES)
