"""What tests of the kit wait with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import waiting


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return waiting.eventually
