"""Recurring triggers: the occurrences of a cron expression in a time zone, one trigger each."""

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

__all__ = ["RecurringTrigger", "build_recurring"]


@dataclass(frozen=True, slots=True)
class RecurringTrigger:
    """A recurring trigger of a topic. `name` is unique in the topic; `zone` is the time zone of the expression."""

    name: str
    expression: str
    zone: ZoneInfo
    payload: object

    def after(self, moment: datetime) -> Iterator[Trigger]:
        """Yield the triggers of all occurrences after a moment, earliest first.

        Key and event id are made of name and time. Several workers that schedule an occurrence therefore make one
        message.
        """
        for occurrence in _iterate_occurrences(self.expression, moment.astimezone(self.zone)):
            at = occurrence.astimezone(UTC)
            if at <= moment:  # the moment lies in an hour that the end of summer time repeats
                continue
            key = f"{self.name}@{at:%Y-%m-%dT%H:%M:%SZ}"
            yield Trigger(key, self.payload, at=at, event_id=key)


def build_recurring(name: str, expression: str, zone: str | ZoneInfo, payload: object) -> RecurringTrigger:
    """Build a recurring trigger.

    Raises InvalidArgument for an invalid name, expression or time zone, and NotConfigured without the extra `cron`.
    """
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    if not isinstance(name, str) or not name:  # the keys of its messages begin with it
        raise InvalidArgument("name", name, "not a name", "Use a text that is not empty")
    try:
        time_zone = zone if isinstance(zone, ZoneInfo) else ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # OSError: "Europe" is a folder of zones
        raise InvalidArgument(
            "tz", zone, f"no such time zone ({error})", 'Use a name such as "Europe/Berlin", or "UTC"'
        ) from None
    _iterate_occurrences(expression, datetime(2000, 1, 1, tzinfo=UTC))
    return RecurringTrigger(name, expression, time_zone, payload)


def _iterate_occurrences(expression: str, moment: datetime) -> CronSim:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise NotConfigured("recurring triggers need the extra `cron`: pip install '.[cron]'") from None
    try:
        return CronSim(expression, moment)
    except CronSimError as error:
        raise InvalidArgument("cron", expression, str(error), "Write five fields, such as '0 9 * * MON-FRI'") from None
