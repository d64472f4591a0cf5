"""Draw the pictures of the docs (`docs/pictures`) as SVG, from what the library does.

The time lines come from a topic under the test clock, and the slots from the functions that place keys, slots and
members. The moves of a key and of a message are lists here, and `tests/topics/test_pictures.py` makes each of them. A
picture follows the light or dark colours of its page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from idemgate import Gate, Topic
from idemgate.core import keys
from idemgate.membership.rendezvous import owned_slots
from idemgate.store.cluster.topology import SLOTS, hash_slot_of
from idemgate.testing import Clock

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 520
"""Of each picture, in pixels: its texts of 14 pixels can be read on a telephone, where it has 360."""
STYLE = """
:root { --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --fill: #f6f8fa; --edge: #59636e;
  --a: #0969da; --a-fill: #ddf4ff; --b: #1a7f37; --b-fill: #dafbe1; --c: #9a6700; --c-fill: #fff8c5; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --faint: #9198a1; --fill: #161b22;
  --edge: #9198a1; --a: #4493f8; --a-fill: #10243e; --b: #3fb950; --b-fill: #12261e; --c: #d29922; --c-fill: #272115;
  --bad: #f85149 } }
text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink); text-anchor: middle;
  paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round }
text.left { text-anchor: start } text.right { text-anchor: end }
text.code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 13px }
text.faint { fill: var(--faint) } text.bold { font-weight: 600 }
text.inside { stroke: none } text.small { font-size: 12px }
rect.paper { fill: var(--paper) } rect.box { fill: var(--fill); stroke: var(--edge) }
rect.a, circle.a { fill: var(--a-fill); stroke: var(--a) } rect.b, circle.b { fill: var(--b-fill); stroke: var(--b) }
rect.c, circle.c { fill: var(--c-fill); stroke: var(--c) }
path { fill: none; stroke: var(--edge); stroke-width: 1.5px } path.head { fill: var(--edge); stroke: none }
path.faint { stroke-width: 1px; stroke-dasharray: 3 3 } path.bad { stroke: var(--bad) }
path.a { stroke: var(--a) } path.b { stroke: var(--b) } path.c { stroke: var(--c) }
"""
Point = tuple[float, float]


class Canvas:
    """The elements of one picture."""

    def __init__(self, height: int, title: str, text: str) -> None:
        self.height = height
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"',
            '  role="img" aria-labelledby="title text">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="text">{escape(text)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
        ]

    def text(self, at: Point, text: str, kind: str = "") -> None:
        x, y = at
        self.lines.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def box(self, corner: Point, size: Point, *texts: str, kind: str = "box") -> None:
        """Draw a box. Its first line of text is bold if it has others."""
        (x, y), (width, height) = corner, size
        self.lines.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>')
        top = y + height / 2 + 5 - 8.5 * (len(texts) - 1)
        for number, text in enumerate(texts):
            style = "bold inside" if len(texts) > 1 and not number else "inside"
            self.text((x + width / 2, top + 17 * number), text, style)

    def line(self, *points: Point, kind: str = "") -> None:
        self.lines.append(f'<path class="{kind}" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>')

    def arrow(self, *points: Point) -> None:
        """Draw a line with a head at its last point."""
        self.line(*points)
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        left, right = (x - 9 * dx - 4 * dy, y - 9 * dy + 4 * dx), (x - 9 * dx + 4 * dy, y - 9 * dy - 4 * dx)
        shape = " L".join(f"{a:.1f} {b:.1f}" for a, b in ((x, y), left, right))
        self.lines.append(f'<path class="head" d="M{shape} Z"/>')

    def dot(self, at: Point, kind: str, radius: float = 5) -> None:
        self.lines.append(f'<circle class="{kind}" cx="{at[0]:g}" cy="{at[1]:g}" r="{radius:g}"/>')

    def cross(self, at: Point) -> None:
        x, y = at
        self.line((x - 5, y - 5), (x + 5, y + 5), kind="bad")
        self.line((x - 5, y + 5), (x + 5, y - 5), kind="bad")

    def svg(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


# -- time lines -------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What became of triggers: the moments of those that were accepted and dropped, and (moment, count, first)."""

    accepted: list[float]
    dropped: list[float]
    deliveries: list[tuple[float, int, float]]


TRIGGERS = (0.5, 0.9, 1.3, 1.7, 2.1, 2.4, 2.9, 5.5, 5.9, 7.9)
"""The seconds at which a key of the time lines is triggered."""
POLICIES: dict[str, dict[str, Any]] = {
    "from the first trigger on, for 2 s": {"window": "2s"},
    "until 1 s passed without a trigger": {"quiet": "1s", "max_delay": None},
    "the same, 2 s after the first at the latest": {"quiet": "1s", "max_delay": "2s"},
    "the same, or with the fourth trigger": {"quiet": "1s", "max_size": 4},
    "at once, and drops the rest": {"window": "2s", "edge": "leading"},
}
LENGTH = 10.0
TICK_MS = 50


def watch(topic: Topic, clock: Clock, triggers: Iterable[float]) -> Seen:
    """Trigger a key at each of these seconds, and take each delivery when it is due."""
    waiting = [round(second * 1000) for second in triggers]
    seen, firsts = Seen([], [], []), list[float]()
    for now in range(0, round(LENGTH * 1000), TICK_MS):
        while waiting and waiting[0] == now:
            accepted = topic.trigger("key", now).accepted
            (seen.accepted if accepted else seen.dropped).append(waiting.pop(0) / 1000)
            if accepted:
                firsts.append(now / 1000)
        for delivery in topic.take():
            seen.deliveries.append((now / 1000, delivery.count, firsts[0]))
            firsts.clear()
            topic.ack(delivery)
        clock.advance(TICK_MS / 1000)
    return seen


def _time_line(canvas: Canvas, seen: Seen, y: float) -> None:
    """Draw triggers on a line at `y`, and deliveries below it."""
    for moment, count, first in seen.deliveries:
        x, width = _x(first) - 8, _x(moment) - _x(first) + 8
        canvas.lines.append(f'<rect class="a" x="{x:g}" y="{y - 9:g}" width="{max(width, 16):g}" height="18" rx="9"/>')
        canvas.arrow((_x(moment), y), (_x(moment), y + 22))
        canvas.box((_x(moment) - 13, y + 22), (26, 20), str(count), kind="b")
    canvas.line((10, y), (WIDTH - 10, y))
    for moment in seen.accepted:
        canvas.dot((_x(moment), y), "c")
    for moment in seen.dropped:
        canvas.cross((_x(moment), y))


def _x(second: float) -> float:
    return round(16 + 48.8 * second, 1)


def _options(policy: dict[str, Any]) -> str:
    return ", ".join(f'{name}="{value}"' if type(value) is str else f"{name}={value}" for name, value in policy.items())


def time_lines(url: str, namespace: str) -> str:
    """Draw what topics with different policies make of the same triggers."""
    height = 92
    canvas = Canvas(
        62 + height * len(POLICIES),
        "When a topic delivers",
        "The same ten triggers of a key under five policies: window, quiet, max_delay, max_size and edge.",
    )
    canvas.dot((20, 20), "c")
    canvas.text((32, 25), "trigger", "left")
    canvas.cross((106, 20))
    canvas.text((118, 25), "dropped trigger", "left")
    canvas.box((242, 10), (26, 20), "3", kind="b")
    canvas.text((276, 25), "delivery of three triggers", "left")
    for number, (text, policy) in enumerate(POLICIES.items()):
        clock = Clock()
        with Gate(url, namespace=namespace, clock=clock, presence=False) as gate:
            seen = watch(gate.topic(f"policy-{number}", **policy), clock, TRIGGERS)
        y = 60 + height * number
        canvas.text((10, y), _options(policy), "left code")
        canvas.text((WIDTH - 10, y), text, "right faint")
        _time_line(canvas, seen, y + 22)
    y = 46 + height * len(POLICIES)
    for second in range(0, int(LENGTH), 2):
        canvas.text((_x(second), y), f"{second} s", "faint")
    return canvas.svg()


# -- the life of a key and of a message -------------------------------------------------------------------------------


class Move(NamedTuple):
    """A move from one state to another, and where its label stands."""

    before: str
    after: str
    label: Sequence[str]
    path: Sequence[Point]
    at: Point
    kind: str = ""


KEY_STATES: dict[str, tuple[Point, Sequence[str]]] = {
    "absent": ((10, 60), ["absent", "or released"]),
    "in_progress": ((198, 60), ["in progress"]),
    "done": ((396, 60), ["done", "or failed"]),
    "lapsed": ((198, 220), ["lapsed"]),
    "held": ((396, 220), ["held"]),
}
KEY_MOVES = [
    Move("absent", "in_progress", ["claim"], [(124, 76), (198, 76)], (160, 68)),
    Move("in_progress", "absent", ["release"], [(198, 96), (124, 96)], (162, 115)),
    Move("in_progress", "done", ["complete"], [(312, 82), (396, 82)], (353, 74)),
    Move(
        "done", "absent", ["retention ends, or forget"],
        [(453, 60), (453, 36), (67, 36), (67, 60)], (260, 28),
    ),
    Move("in_progress", "lapsed", ["no heartbeat", "for a lease"], [(236, 108), (236, 220)], (230, 160), "right"),
    Move(
        "lapsed", "in_progress", ["claim: a", "new owner"],
        [(276, 220), (276, 108)], (282, 160), "left",
    ),
    Move("in_progress", "held", ['with "hold"'], [(312, 102), (410, 220)], (358, 142), "left"),
    Move("held", "done", ["resolve"], [(474, 220), (474, 108)], (468, 200), "right"),
]  # fmt: skip
MESSAGE_STATES: dict[str, tuple[Point, Sequence[str]]] = {
    "scheduled": ((10, 90), ["scheduled"]),
    "ready": ((208, 90), ["ready"]),
    "in_flight": ((396, 90), ["in flight"]),
    "waiting": ((10, 270), ["waiting"]),
    "dead": ((208, 270), ["dead letter"]),
    "gone": ((396, 270), ["gone"]),
}
MESSAGE_MOVES = [
    Move("none", "scheduled", ["trigger"], [(34, 24), (34, 90)], (42, 36), "left"),
    Move("scheduled", "ready", ["due"], [(124, 114), (208, 114)], (166, 106)),
    Move("ready", "in_flight", ["take"], [(322, 104), (396, 104)], (358, 96)),
    Move("in_flight", "ready", ["lease ends"], [(396, 126), (322, 126)], (359, 145)),
    Move(
        "in_flight", "scheduled", ["nack: after its backoff"],
        [(453, 90), (453, 66), (90, 66), (90, 90)], (272, 58),
    ),
    Move("in_flight", "gone", ["ack"], [(474, 138), (474, 270)], (482, 200), "left"),
    Move("in_flight", "dead", ["bury, or the", "last attempt"], [(420, 138), (318, 270)], (382, 205), "left"),
    Move("dead", "ready", ["redrive"], [(250, 270), (250, 138)], (244, 225), "right"),
    Move("none", "waiting", ["trigger while its", "key is in flight"], [(34, 384), (34, 318)], (42, 360), "left"),
    Move("waiting", "scheduled", ["the delivery", "ends"], [(60, 270), (60, 138)], (68, 200), "left"),
]  # fmt: skip


def _states(
    canvas: Canvas, states: dict[str, tuple[Point, Sequence[str]]], moves: Iterable[Move], kinds: dict[str, str]
) -> str:
    for move in moves:
        canvas.arrow(*move.path)
    for name, (corner, texts) in states.items():
        canvas.box(corner, (114, 48), *texts, kind=kinds.get(name, "box"))
    for move in moves:
        x, y = move.at
        for number, text in enumerate(move.label):
            canvas.text((x, y + 17 * number), text, move.kind)
    return canvas.svg()


def key_life() -> str:
    """Draw the states of a guarded key."""
    text = "The states of a guarded key, and what moves it from one to another."
    kinds = {"in_progress": "a", "lapsed": "c", "held": "c", "done": "b"}
    return _states(Canvas(286, "The life of a key", text), KEY_STATES, KEY_MOVES, kinds)


def message_life() -> str:
    """Draw the states of a message."""
    text = "The states of a message of a topic, and what moves it from one to another."
    kinds = {"in_flight": "a", "dead": "c", "waiting": "box", "gone": "b"}
    return _states(Canvas(396, "The life of a message", text), MESSAGE_STATES, MESSAGE_MOVES, kinds)


# -- an integration, and slots ----------------------------------------------------------------------------------------

ACTIONS = {"ack": "acknowledge", "retry": "retry after a delay", "reject": "dead letter"}
"""What an integration does with the broker for each action of a verdict."""


def integration() -> str:
    """Draw who calls whom when an integration handles a message."""
    canvas = Canvas(
        500, "The seams of an integration", "A broker, an integration, the guard and a handler, and the calls between."
    )
    lanes = {"broker": 58, "integration": 192, "guard": 328, "handler": 462}
    for name, x in lanes.items():
        canvas.line((x, 44), (x, 370 if name in {"guard", "handler"} else 486), kind="faint")
        canvas.box((x - 50, 14), (100, 30), name, kind="a" if name == "guard" else "box")
    steps = [
        ("broker", "integration", "message"),
        ("integration", "guard", "run(key, ...)"),
        ("guard", "handler", "first: message"),
        ("guard", "broker", "keep: no redelivery yet"),
        ("handler", "guard", "result, or raises"),
        ("guard", "integration", "verdict.action"),
    ]
    y = 76.0
    for start, end, label in steps:
        canvas.arrow((lanes[start], y), (lanes[end], y))
        canvas.text(((lanes[start] + lanes[end]) / 2, y - 7), label)
        if (start, end) == ("integration", "guard"):
            canvas.text((lanes["guard"] + 8, y + 20), "claim, heartbeats", "left faint")
        if (start, end) == ("handler", "guard"):
            canvas.text((lanes["guard"] + 8, y + 20), "complete, release", "left faint")
        y += 54
    for action, verb in ACTIONS.items():
        canvas.arrow((lanes["integration"], y), (lanes["broker"], y))
        canvas.text((lanes["integration"] + 10, y + 5), f'"{action}"', "left code")
        canvas.text((lanes["integration"] + 84, y + 5), verb, "left")
        y += 34
    return canvas.svg()


MEMBERS = ("A", "B", "C")
TOPIC = "thumbnails"
NODES = 3
SLOT_COUNT = 8
KEYS = ("cat.png", "dog.png", "fox.png", "owl.png", "elk.png")


def slots() -> str:
    """Draw the slots of a topic: the keys in each, the worker that polls it and the node that stores it."""
    canvas = Canvas(
        330, "Slots over workers and nodes", "The eight slots of a topic, divided among three workers and three nodes."
    )
    kinds = dict(zip(MEMBERS, "abc", strict=True))
    centres = {number: 40 + 63 * number for number in range(SLOT_COUNT)}
    places = [90.0, 260.0, 430.0]
    for member, x in zip(MEMBERS, places, strict=True):
        for number in sorted(owned_slots(member, MEMBERS, TOPIC, SLOT_COUNT)):
            canvas.line((x, 54), (centres[number], 110), kind=kinds[member])
        canvas.box((x - 60, 20), (120, 34), f"worker {member}", kind=kinds[member])
    for node, x in enumerate(places):
        for number, centre in centres.items():
            (name, *_) = keys.slot("shop", TOPIC, number, SLOT_COUNT)
            if hash_slot_of(name) * NODES // SLOTS == node:
                canvas.line((centre, 180), (x, 272))
        canvas.box((x - 60, 272), (120, 34), f"node {node + 1}")
    for number, x in centres.items():
        (member,) = (one for one in MEMBERS if number in owned_slots(one, MEMBERS, TOPIC, SLOT_COUNT))
        canvas.box((x - 28, 110), (56, 70), kind=kinds[member])
        canvas.text((x, 128), f"slot {number}", "bold inside")
        for row, key in enumerate(one for one in KEYS if keys.slot_of(one.encode(), SLOT_COUNT) == number):
            canvas.text((x, 148 + 16 * row), key, "inside small")
    return canvas.svg()


# -- the picture of README.md -----------------------------------------------------------------------------------------


def merging(url: str, namespace: str) -> str:
    """Draw the program of README.md: a duplicate is dropped, and the rest becomes one delivery."""
    clock = Clock()
    canvas = Canvas(126, "Four events, one delivery", "A duplicate is dropped. Three triggers merge into one delivery.")
    with Gate(url, namespace=namespace, clock=clock, presence=False) as gate:
        images = gate.topic("images", window="4s")

        @gate.once(key="{number}", scope="events", on_done="skip")
        def on_change(number: int) -> bool:
            return images.trigger("cat.png", number).accepted

        canvas.box((40, 72), (350, 20), kind="a")
        for x, number in zip((50, 120, 240, 330), (1, 2, 2, 3), strict=True):
            canvas.text((x, 26), f"event {number}")
            if on_change(number):
                canvas.arrow((x, 34), (x, 74))
                canvas.dot((x, 82), "c")
            else:
                canvas.line((x, 34), (x, 46))
                canvas.cross((x, 52))
                canvas.text((x - 10, 57), "once: dropped", "right faint")
            clock.advance("1s")
        [delivery] = images.take()
    canvas.text((215, 114), "merge: one window", "faint")
    canvas.arrow((390, 82), (410, 82))
    canvas.box((410, 56), (100, 52), "1 delivery", f"of {delivery.count} triggers", kind="b")
    return canvas.svg()


def pictures(url: str, namespace: str) -> dict[str, str]:
    """Return each picture by the name of its file. The namespace is empty, and stays so but for two topics."""
    return {
        "integration": integration(),
        "key": key_life(),
        "merging": merging(url, f"{namespace}-merging"),
        "message": message_life(),
        "slots": slots(),
        "triggers": time_lines(url, f"{namespace}-triggers"),
    }


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures("embedded://", "pictures").items():
        (FOLDER / f"{name}.svg").write_text(svg)
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
