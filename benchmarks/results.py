"""What was measured, a JSON file a part, in the cache: a report can be written again without measuring again."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.environments import RESULTS

__all__ = ["load", "save"]


def save(part: str, found: object) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{part}.json").write_text(json.dumps(found, indent=1))


def load(part: str) -> Any:
    """What `save` kept, or None; None as well for a file in an older form."""
    file = RESULTS / f"{part}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return found if "rows" in found else None
