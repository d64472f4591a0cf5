"""Recurring triggers: the occurrences of a cron expression in a time zone, each one trigger, whoever plans it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from idemgate.errors import InvalidArgument, NotConfigured
from idemgate.topics.messages import Trigger

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

__all__ = ["Recurring", "recurring"]


@dataclass(frozen=True, slots=True)
class Recurring:
    """One recurring trigger of a topic. `name` tells it from others; `zone` is where the expression is read."""

    name: str
    expression: str
    zone: ZoneInfo
    payload: object

    def after(self, moment: datetime) -> Iterator[Trigger]:
        """The triggers of the occurrences after a moment, soonest first.

        Each has a key and an event id of its own, made of name and time: whoever plans it, and however often, it is one
        message.
        """
        for occurrence in _simulated(self.expression, moment.astimezone(self.zone)):
            at = occurrence.astimezone(UTC)
            if at <= moment:  # begun inside of an hour that the end of summer time repeats
                continue
            key = f"{self.name}@{at:%Y-%m-%dT%H:%M:%SZ}"
            yield Trigger(key, self.payload, at=at, event_id=key)


def recurring(name: str, expression: str, zone: str | ZoneInfo, payload: object) -> Recurring:
    """Checks it: InvalidArgument for an expression or a zone that is none, NotConfigured without the extra `cron`."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    if not isinstance(name, str) or not name:  # the keys of its messages begin with it
        raise InvalidArgument("name", name, "not a name", "Use a text that is not empty")
    try:
        found = zone if isinstance(zone, ZoneInfo) else ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # OSError: "Europe" is a folder of zones
        raise InvalidArgument(
            "tz", zone, f"no such time zone ({error})", 'Use a name such as "Europe/Berlin", or "UTC"'
        ) from None
    _simulated(expression, datetime(2000, 1, 1, tzinfo=UTC))
    return Recurring(name, expression, found, payload)


def _simulated(expression: str, moment: datetime) -> CronSim:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise NotConfigured("recurring triggers need the extra `cron`: pip install '.[cron]'") from None
    try:
        return CronSim(expression, moment)
    except CronSimError as error:
        raise InvalidArgument("cron", expression, str(error), "Write five fields, such as '0 9 * * MON-FRI'") from None
