"""Recurring triggers: the occurrences of a cron expression in a time zone, one trigger each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Literal

from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import InvalidArgument, NotConfigured
from idemgate.topics.messages import Trigger

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

__all__ = ["Misfire", "RecurringTrigger", "build_recurring"]

Misfire = Literal["once", "all"]
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MINUTE, _MICROSECOND = timedelta(minutes=1), timedelta(microseconds=1)
_FIX = "Write five fields: minute, hour, day, month, weekday, such as '0 9 * * MON-FRI'"


@dataclass(frozen=True, slots=True)
class RecurringTrigger:
    """A recurring trigger of a topic. `name` is unique in the topic; `zone` is the time zone of the expression.

    `schedule` is the expression as `cronsim` has to read it. `grace` is the longest delay of an occurrence; None means
    any.
    """

    name: str
    expression: str
    schedule: str
    zone: tzinfo
    payload: object
    misfire: Misfire = "once"
    grace: timedelta | None = None

    def after(self, moment: datetime) -> Iterator[Trigger]:
        """Yield the triggers of all occurrences after a moment, earliest first."""
        return map(self.trigger, self._times(moment))

    def trigger(self, at: datetime) -> Trigger:
        """Return the trigger of the occurrence at a time.

        Key and event id are made of name and time. Several workers that schedule an occurrence therefore make one
        message.
        """
        key = f"{self.name}@{at:{_TIME}}"
        return Trigger(key, self.payload, at=at, event_id=key)

    def time_of(self, key: str) -> datetime | None:
        """Return the time of the occurrence with this key; None for any other key."""
        name, _, time = key.rpartition("@")
        try:
            at = datetime.strptime(time, _TIME).replace(tzinfo=UTC)
        except ValueError:
            return None
        return at if name == self.name and self.trigger(at).key == key else None

    def is_late(self, at: datetime, now: datetime) -> bool:
        """Return True if an occurrence must not begin any more."""
        return self.grace is not None and now - at > self.grace

    def find_missed(self, last: datetime, now: datetime) -> datetime | None:
        """Return the next occurrence to make up for, of those after `last` and up to `now`.

        It is the newest one, or, with the policy "all", the oldest within `grace`.
        """
        first = self.next_after(last if self.grace is None else max(last, now - self.grace - _MICROSECOND))
        if first is None or first > now:
            return None
        return first if self.misfire == "all" else self._newest(first, now)

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the time of the first occurrence after a moment; None if there is none."""
        return next(self._times(moment), None)

    def _newest(self, first: datetime, now: datetime) -> datetime:
        """Return the newest occurrence up to `now`, by bisection: `first` is one of them."""
        end = now
        while end - first >= _MINUTE:  # occurrences are whole minutes
            middle = first + (end - first) / 2
            found = self.next_after(middle)
            if found is not None and found <= now:
                first = found
            else:
                end = middle
        return first

    def _times(self, moment: datetime) -> Iterator[datetime]:
        for occurrence in _iterate_occurrences(self.schedule, moment.astimezone(self.zone)):
            at = occurrence.astimezone(UTC)
            if at > moment:  # else the moment lies in an hour that the end of summer time repeats
                yield at


def build_recurring(
    name: str,
    expression: str,
    zone: str | ZoneInfo,
    payload: object,
    misfire: Misfire = "once",
    misfire_grace: Duration | None = None,
) -> RecurringTrigger:
    """Build a recurring trigger.

    Raises InvalidArgument for an invalid name, expression, time zone or policy. Raises NotConfigured without the extra
    `cron`, or without a time-zone database.
    """
    if not isinstance(name, str) or not name:  # the keys of its messages begin with it
        raise InvalidArgument("name", name, "not a name", "Use a text that is not empty")
    time_zone = _find_zone(zone)
    schedule = _to_schedule(expression)
    if misfire not in ("once", "all"):
        raise InvalidArgument("misfire", misfire, "neither once nor all", 'Use "once" or "all"')
    if misfire == "all" and misfire_grace is None:
        fix = 'Pass misfire_grace="1h": older occurrences are left out'
        raise InvalidArgument("misfire", misfire, "no bound for the number of occurrences to make up for", fix)
    grace = None if misfire_grace is None else timedelta(milliseconds=milliseconds(misfire_grace, "misfire_grace"))
    return RecurringTrigger(name, expression, schedule, time_zone, payload, misfire, grace)


def _find_zone(zone: str | ZoneInfo) -> tzinfo:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

    if isinstance(zone, ZoneInfo):
        return zone
    if zone == "UTC":  # needs no database
        return UTC
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:  # OSError: "Europe" is a folder of zones
        if not available_timezones():
            raise NotConfigured(
                f"the time zone {zone!r} needs a time-zone database, and this system has none: pip install tzdata"
            ) from None
        fix = 'Use a name such as "Europe/Berlin", or "UTC". If the system lacks this zone: pip install tzdata'
        raise InvalidArgument("tz", zone, f"no such time zone ({error})", fix) from None


def _to_schedule(expression: str) -> str:
    """Check a cron expression; return it in the form in which `cronsim` handles changes of the clocks as documented.

    `cronsim` decides by a "*" at the beginning of minute or hour. Such an expression has no occurrence in a skipped
    hour, and two in a repeated one. Here the set of hours decides.
    """
    if not isinstance(expression, str):
        raise InvalidArgument("cron", expression, "not a text", _FIX)
    fields = expression.split()
    if len(fields) != 5:
        problem = f"it has {len(fields)} fields; there is none for seconds" if len(fields) == 6 else "not five fields"
        raise InvalidArgument("cron", expression, problem, _FIX)
    hours = _iterate_occurrences(expression, datetime(2000, 1, 1, tzinfo=UTC)).hours
    if len(hours) == 24:
        fields[1] = "*"
    else:
        for position, every in enumerate(("0-59", "0-23")):
            if fields[position].startswith("*"):
                fields[position] = every + fields[position][1:]
    return " ".join(fields)


def _iterate_occurrences(expression: str, moment: datetime) -> CronSim:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise NotConfigured("recurring triggers need the extra `cron`: pip install '.[cron]'") from None
    try:
        cron = CronSim(expression, moment)
    except CronSimError as error:
        raise InvalidArgument("cron", expression, str(error), _FIX) from None
    if len(cron.minutes) == 1 and len(cron.hours) == 24:
        cron.minutes.add(
            60
        )  # never matches: a single minute is reached by a jump, even across a change of half an hour
    return cron
