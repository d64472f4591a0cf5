"""The page in Chromium: every verb by mouse and by keyboard, what strangers put into the store, and what it loads."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="the group `browser` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `ui` is not installed")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402

from idemgate import Gate, Trigger  # noqa: E402
from idemgate.audit.running import findings  # noqa: E402
from idemgate.operate.arguments import read_command  # noqa: E402
from idemgate.testing import Clock  # noqa: E402
from idemgate.ui import READS as READING  # noqa: E402
from idemgate.ui import Access, app  # noqa: E402
from tests.audit.test_running import CASES, SOUND, snapshot  # noqa: E402
from tests.needs import report_missing  # noqa: E402
from tests.operate.test_status import serve  # noqa: E402
from tests.operate.test_verbs import CHANGES, HELD, READS, SCANNING, Case, acts  # noqa: E402
from tests.presence.conftest import report  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

ROOT = Path(__file__).parents[2]
ANN = Access("ann@example.com", "all")
PICTURES = os.environ.get("IDEMGATE_PICTURES")
"""The folder for pictures of the page, such as docs/page; none are taken without it."""
expect = sync_api.expect


@pytest.fixture
def namespace(namespace: str) -> str:
    """The namespace of a test; pictures show another name."""
    return "shop" if PICTURES else namespace


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system. It starts once for each process of the tests."""
    program = shutil.which("chromium")
    if program is None:
        report_missing("chromium")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def address(url: str, namespace: str) -> Iterator[Callable[..., str]]:
    """`address(Access("bob"))`: the address of a server with the page of the test's namespace."""
    ends = list[Callable[[], None]]()

    def serve_page(access: Access | None = ANN, as_user: str = url, **options: Any) -> str:
        gate = Gate(as_user, namespace=namespace, presence=False)
        page = app(gate, access=options.pop("ask", lambda _: access), **options)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(page, log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(30)
            listening.close()
            gate.close()

        ends.append(end)
        return f"http://127.0.0.1:{listening.getsockname()[1]}/"

    yield serve_page
    for end in ends:
        end()


class Seen:
    """A tab, and what went wrong in it."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(20_000)
        self.tab = self.context.new_page()
        self.address = address
        self.wrong = list[str]()
        self.requests = list[str]()
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.tab.on("request", lambda request: self.requests.append(request.url))

    def go(self, path: str) -> Any:
        """Open a screen and wait until it is drawn."""
        self.tab.goto(f"{self.address}#/{path}")
        expect(self.tab.locator("h1")).to_be_visible()
        return self.tab

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []
        assert [one for one in self.requests if not one.startswith((self.address, "blob:"))] == []


@pytest.fixture
def see(browser: Any, address: Callable[..., str]) -> Iterator[Callable[..., Seen]]:
    """`see(Access("bob"), as_user=url, color_scheme="dark")`: a tab with the page. It may report no error, and may
    load nothing from elsewhere."""
    seen = list[Seen]()

    def open_tab(access: Access | None = ANN, color_scheme: str = "light", **options: Any) -> Seen:
        seen.append(Seen(browser, address(access, **options), color_scheme=color_scheme))
        return seen[-1]

    yield open_tab
    for one in seen:
        one.close()


# -- each verb --------------------------------------------------------------------------------------------------------


class Mouse:
    """An operator with a mouse. Texts are typed."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab

    def press(self, target: Any) -> None:
        target.click()

    def fill(self, name: str, text: str) -> None:
        field = self.tab.locator(f"#form [name={name}]")
        field.click()
        self.tab.keyboard.type(text)


class Keyboard(Mouse):
    """An operator with a keyboard, who goes from one element to the next with the tab key."""

    def press(self, target: Any) -> None:
        if target.get_attribute("type") == "radio":  # the tab key reaches one of a choice, the arrows reach the others
            self.reach(self.tab.locator("#form [type=radio]").first)
            self.tab.keyboard.press("Space")
            while not target.is_checked():
                self.tab.keyboard.press("ArrowDown")
            return
        self.reach(target)
        self.tab.keyboard.press("Space" if target.get_attribute("type") == "checkbox" else "Enter")

    def fill(self, name: str, text: str) -> None:
        self.reach(self.tab.locator(f"#form [name={name}]"))
        self.tab.keyboard.press("Control+A")
        self.tab.keyboard.type(text)

    def reach(self, target: Any) -> None:
        trail = list[str]()
        for _ in range(150):
            if target.evaluate("one => document.activeElement === one"):
                return
            self.tab.keyboard.press("Tab")
            trail.append(self.tab.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
        raise AssertionError(f"the tab key does not reach {target}, but {trail}")


def use(seen: Seen, hand: type[Mouse], words: tuple[str, ...], why: str = "") -> None:
    """Run a verb from the list of commands, as a person would."""
    found = read_command(shlex.join(["idemgate", *words]))
    assert found is not None
    verb, arguments = found
    tab = seen.go("commands")
    person = hand(tab)
    label = {"ls": "List", "rm": "Delete"}.get(verb.name, verb.name.capitalize().replace("-", " "))
    listed = tab.locator("h2", has_text=re.compile(f"^{verb.noun} ")).locator("+ ul")
    person.press(listed.get_by_role("button", name=label, exact=True))
    for name, value in arguments.items():
        field = tab.locator(f"#form [name={name}], #form [type=radio][value={name}]")
        if value is True:
            person.press(field)
        elif field.get_attribute("type") == "file":
            field.set_input_files(value)
        else:
            person.fill(name, value if isinstance(value, str) else "\n".join(value))
    primary = tab.locator("#form .primary")
    person.press(primary)
    if verb.changes:
        expect(tab.get_by_label("What would change")).to_be_visible()
        if why:
            person.fill("why", why)
        if verb.loses:
            expect(primary).to_be_disabled()
            person.fill("confirm", arguments[verb.subject or ""])
        person.press(primary)
    expect(tab.get_by_role("status", name="Result")).to_be_visible()


HANDS = [Mouse, Keyboard]


@pytest.mark.slow
@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("one", CHANGES, ids=lambda one: " ".join(one.words))
def test_each_change_is_made_by_mouse_and_by_keyboard(
    filled: Gate, users: Any, one: Case, hand: type[Mouse], see: Callable[..., Seen]
) -> None:
    seen = see(as_user=users("operator", *SCANNING.get(one.words[:2], ())))
    use(seen, hand, one.words, "a reason")
    assert one.effect(filled)
    [act] = acts(filled)
    assert (act["who"], act["why"]) == ("ann@example.com", "a reason")
    assert act["what"].split()[:3] == list(one.words[:3])
    result = seen.tab.get_by_role("status", name="Result")
    for name, value in one.answer.items():
        shown = {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
        assert re.search(rf"{name.replace('_', ' ')}\s*{shown}", result.inner_text()), name


@pytest.mark.slow
@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("words", [*READS, " ".join(HELD), "dead export jobs"])
def test_each_verb_that_reads_is_used_by_mouse_and_by_keyboard(
    filled: Gate, users: Any, stored: Any, words: str, hand: type[Mouse], see: Callable[..., Seen]
) -> None:
    before = stored()
    seen = see(Access("bob", "read"), as_user=users("operator", "auditor"))
    use(seen, hand, tuple(words.split()))
    assert stored() == before


def test_a_change_on_the_page(filled: Gate, see: Callable[..., Seen]) -> None:
    # By the keyboard alone, Escape closes the form, and the focus returns to its button
    seen = see()
    tab = seen.go("topic/jobs")
    pause = tab.get_by_role("button", name="Pause")
    Keyboard(tab).press(pause)
    expect(tab.get_by_role("dialog", name="topic pause")).to_be_visible()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("dialog")).to_have_count(0)
    expect(pause).to_be_focused()
    # By the mouse
    use(seen, Mouse, ("topic", "pause", "jobs"), "outage")
    assert filled.topic("jobs").stats().paused.reason == "outage"
    tab = seen.go("topic/jobs")
    expect(tab.locator(".lead")).to_contain_text(re.compile("paused, since 20.* UTC, by\\s+.*: “outage”"))


# -- screens ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finding_is_mended_by_its_button(filled: Gate, see: Callable[..., Seen]) -> None:
    seen = see()
    tab = seen.go("now")
    found = tab.locator(".findings li", has_text="died lately")
    found.get_by_text("Why").click()
    expect(found).to_contain_text("Likely cause: handlers gave up messages lately.")
    found.get_by_role("button", name="Redrive letters").click()
    tab.get_by_role("button", name="Look first").click()
    expect(tab.get_by_label("What would change")).to_contain_text("ValueError: bad")
    tab.locator("#form .primary").click()
    expect(tab.get_by_role("status", name="Result")).to_contain_text(re.compile(r"redriven\s*2"))
    expect(tab.locator(".findings li", has_text="died lately")).to_have_count(0)
    assert filled.topic("jobs").stats().dead == 0


BUTTONS = {
    "topic-paused": "Resume topic", "poison-message": "Bury message",
    "dead-letters": "Redrive letters", "version-ahead": "Reset version", "changing": "Reshard topic",
}  # fmt: skip
"""The findings that a change mends. The others lead to a screen."""


@pytest.mark.slow
def test_each_finding_is_shown_with_what_mends_it(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, see: Callable[..., Seen]
) -> None:
    planted = [next(iter(CASES.values()))[0][0]]
    monkeypatch.setattr("idemgate.ui.api.take_snapshot", lambda *_: planted[0])
    monkeypatch.setattr("idemgate.ui.api.FRESH", -1.0)
    seen = see()
    for kind, cases in CASES.items():
        planted[0] = cases[0][0]
        tab = seen.tab
        tab.goto("about:blank")
        found = seen.go("now").locator(".findings li")
        expect(found).to_have_count(1)
        expect(found).to_contain_text(findings(planted[0])[0].what)
        found.get_by_text("Why").click()
        expect(found).to_contain_text(kind)
        if kind in BUTTONS:
            found.get_by_role("button", name=BUTTONS[kind]).click()
            expect(tab.get_by_role("dialog")).to_be_visible()
        else:
            if kind == "key-held":  # one decision is chosen
                found.get_by_role("button", name="Resolve").click()
                for flag in ("done", "again"):
                    tab.locator(f"#form [value={flag}]").check()
                expect(tab.locator("#form .command")).to_have_text(
                    "idemgate key resolve order-7 --scope charge --again"
                )
                tab.keyboard.press("Escape")
            found.get_by_role("link", name="Look").click()
            expect(tab).to_have_url(re.compile("#/(processes|process/.+|topic/.+|key)"))
    seen.wrong[:] = [one for one in seen.wrong if "400" not in one]  # the store has none of what is planted
    # And where a server evicted keys, no list is taken for all that happened
    evicting = SOUND._replace(info={**SOUND.info, "evicted_keys": 3})
    planted[0] = snapshot(servers={"h:1": evicting})
    for screen in ("audit", "key"):
        tab.goto("about:blank")
        expect(seen.go(screen).locator("main")).to_contain_text("acts and histories may be missing")
    # And all that is wrong with one server is one box, with commands to copy
    full = {**SOUND.info, "maxmemory": 100, "used_memory": 99, "maxmemory_policy": "allkeys-lru", "evicted_keys": 3}
    planted[0] = snapshot(servers={"h:1": SOUND._replace(info=full)})
    tab.goto("about:blank")
    found = seen.go("now").locator(".findings li")
    expect(found).to_have_count(1)
    expect(found.locator(".finding")).to_have_count(3)
    expect(found.locator("strong")).to_have_text(["h:1"])
    seen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    found.get_by_role("button", name="Copy").first.click()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == found.locator(".command").first.inner_text() == findings(planted[0])[0].mend


@pytest.mark.slow
def test_dead_letters_of_one_error_are_selected_together(gate: Gate, see: Callable[..., Seen]) -> None:
    topic = gate.topic("jobs")
    topic.trigger_many([Trigger(f"k{n}", n) for n in range(30)])
    for n, delivery in enumerate(topic.take(30)):
        topic.bury(delivery, reason=f"Timeout: {n} s of 'host{n}'" if n % 3 else f"KeyError: '{n}'")
    seen = see()
    tab = seen.go("dead/jobs?window=all")
    expect(tab.locator("main")).to_contain_text("30 letters of any time, in 2 groups by error.")
    expect(tab.locator("details.group summary").first).to_contain_text(re.compile("20 *Timeout: … s of '…'"))
    group = tab.locator("details.group").first
    group.locator("summary").click()
    group.get_by_role("button", name="Redrive 20 letters").click()
    tab.get_by_role("button", name="Look first").click()
    tab.locator("#form .primary").click()
    expect(tab.get_by_role("status", name="Result")).to_contain_text(re.compile(r"redriven\s*20"))
    assert {one.reason[:8] for one in topic.dead.list()} == {"KeyError"}
    tab.keyboard.press("Escape")
    # The filters are in the URL, and what matches them is selected
    tab.get_by_label("Reason contains").fill("'3'")
    tab.keyboard.press("Enter")
    expect(tab).to_have_url(re.compile(r"#/dead/jobs\?window=all&reason=%273%27$"))
    expect(tab.locator("main")).to_contain_text("1 letter of any time")
    tab.get_by_role("button", name="Delete all that match").click()
    tab.get_by_role("button", name="Look first").click()
    expect(tab.get_by_label("What would change")).to_contain_text("KeyError: '3'")
    tab.get_by_label("to confirm").fill("jobs")
    tab.locator("#form .primary").click()
    expect(tab.get_by_role("status", name="Result")).to_contain_text(re.compile(r"deleted\s*1"))
    assert topic.stats().dead == 9
    # An export is a file
    tab.keyboard.press("Escape")
    tab.get_by_label("Reason contains").fill("")
    tab.keyboard.press("Enter")
    tab.get_by_role("button", name="Export").click()
    with tab.expect_download() as download:
        tab.locator("#form .primary").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert (download.value.suggested_filename, len(lines)) == ("jobs.ndjson", 9)


@pytest.mark.slow
def test_a_key_is_found_wherever_it_is(filled: Gate, see: Callable[..., Seen]) -> None:
    seen = see()
    tab = seen.go("key")
    tab.get_by_label("Key", exact=True).fill("runs")
    tab.keyboard.press("Enter")
    expect(tab).to_have_url(re.compile("#/key[?]key=runs$"))
    expect(tab.get_by_role("region", name="Guarded")).to_contain_text("in_progress")
    expect(tab.get_by_role("region", name="Messages")).to_contain_text("in flight")
    # Payloads are shown on request, and this too is in the URL
    tab = seen.go("key?key=waits")
    expect(tab.get_by_role("region", name="Messages")).to_contain_text("pending")
    assert '{"n":3}' not in tab.content()
    tab.get_by_label("Show payloads and results").check()
    expect(tab.get_by_role("region", name="Messages")).to_contain_text('{"n":3}')
    expect(tab).to_have_url(re.compile("#/key[?]key=waits&values=1$"))
    tab = seen.go("key?key=nowhere")
    expect(tab.locator("main")).to_contain_text("Nothing is stored for this key.")
    expect(tab.locator("main")).to_contain_text("Searched scopes: claim, first. Searched topics: empty, jobs.")
    expect(tab.locator("main")).to_contain_text("No trace since")
    # And one that died is there with the button that brings it back
    tab = seen.go("key?key=bad")
    letters = tab.get_by_role("region", name="Dead letters")
    expect(letters).to_contain_text("ValueError: bad")
    letters.get_by_role("button", name="Redrive").click()
    expect(tab.get_by_role("dialog", name="dead redrive")).to_be_visible()
    # And one that is gone says what happened to it
    tab = seen.go("key?key=gone")
    expect(tab.locator("main")).to_contain_text("Nothing is stored for this key.")
    expect(tab.get_by_role("region", name="What happened")).to_contain_text("buried")
    expect(tab.locator("main")).not_to_contain_text("No trace since")


@pytest.mark.slow
def test_processes_and_acts_are_shown(filled: Gate, see: Callable[..., Seen]) -> None:
    serve(filled, "jobs")
    filled.topic("jobs").pause()
    seen = see()
    tab = seen.go("processes")
    tab.get_by_role("region", name="Processes").get_by_role("link", name=re.compile(":")).click()
    expect(tab).to_have_title(re.compile("^.+:[0-9]+ · .* · idemgate$"))
    expect(tab.locator("dl").first).to_contain_text("0 of 2")
    use(seen, Mouse, ("topic", "resume", "jobs"), "it is over")
    tab = seen.go("audit")
    expect(tab.get_by_role("region", name="Acts")).to_contain_text(
        re.compile("ann@example.com\\s*topic resume jobs\\s*it is over")
    )


@pytest.mark.slow
def test_who_may_only_read_sees_no_button(filled: Gate, users: Any, see: Callable[..., Seen]) -> None:
    for options in ({"as_user": users("viewer")}, {"access": Access("bob", "read")}):
        seen = see(**options)
        for path in ("topic/jobs", "dead/jobs", "key?key=waits", "commands", "now"):
            tab = seen.go(path)
            expect(tab.locator(".badge")).to_have_text("read only")
            wait_until(lambda tab=tab: tab.evaluate("document.readyState") == "complete")
            names = {one.inner_text() for one in tab.get_by_role("button").all()}
            assert names <= {
                "Show",
                "List",
                "Messages",
                "Peek",
                "Versions",
                "Export",
                "Trace",
                "Show payloads",
                "Find",
                "Find held keys",
            }
    some = see(Access("bob", {*READING, "topic pause"}))
    tab = some.go("topic/jobs")
    expect(tab.get_by_role("button", name="Pause")).to_be_visible()
    expect(tab.get_by_role("button", name="Delete")).to_have_count(0)
    expect(tab.locator(".badge")).to_have_count(0)


@pytest.mark.slow
def test_a_token_is_asked_for(filled: Gate, see: Callable[..., Seen]) -> None:
    def ask(request: Any) -> Access | None:
        return ANN if request.headers.get("authorization") == "Bearer a-long-token" else None

    seen = see(ask=ask)
    tab = seen.go("now")
    tab.get_by_label("Token").fill("wrong")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("alert")).to_contain_text("give a token")
    tab.get_by_label("Token").fill("a-long-token")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("region", name="Topics")).to_contain_text("jobs")
    assert all("a-long-token" not in one for one in seen.requests)
    seen.wrong[:] = [one for one in seen.wrong if "401" not in one]  # Chromium reports the refused requests


@pytest.mark.slow
def test_a_store_that_goes_away_is_said_and_comes_back(
    filled: Gate, monkeypatch: pytest.MonkeyPatch, see: Callable[..., Seen]
) -> None:
    from idemgate.errors import StoreUnavailable
    from idemgate.ui import api

    take, away = api.take_snapshot, threading.Event()

    def take_or_fail(*given: Any) -> Any:
        if away.is_set():
            raise StoreUnavailable("the store is away", executed="no")
        return take(*given)

    monkeypatch.setattr(api, "take_snapshot", take_or_fail)
    seen = see()
    tab = seen.go("now")
    expect(tab.get_by_role("region", name="Topics")).to_contain_text("jobs")
    away.set()
    expect(tab.get_by_role("alert")).to_contain_text(
        re.compile("The store does not answer since 20.* UTC: the store is away.")
    )
    expect(tab.locator("main")).to_contain_text(re.compile(r"What follows was read [\d.]+ m?s ago."))
    expect(tab.locator(".stale h1")).to_be_visible()
    expect(tab.get_by_role("region", name="Topics")).to_contain_text("jobs")
    away.clear()
    expect(tab.get_by_role("alert")).to_have_count(0)
    expect(tab.locator(".stale")).to_have_count(0)
    seen.wrong[:] = [one for one in seen.wrong if "503" not in one]


# -- what strangers sent ----------------------------------------------------------------------------------------------

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.mark.slow
def test_what_strangers_chose_is_text(gate: Gate, see: Callable[..., Seen]) -> None:
    key = f"{MARKUP}\u202e\x1b[2J"
    topic = gate.topic("jobs", group_concurrency=1)
    topic.trigger_many([Trigger(key, {"text": MARKUP}, group=MARKUP), Trigger("other", 1, group=MARKUP)])
    topic.take(1)
    topic.trigger_many([Trigger("dies", MARKUP, group=f"{MARKUP}2")])
    topic.bury("dies", reason=MARKUP)
    gate.claim(key).complete(MARKUP)
    topic.pause(MARKUP)
    gate.context.activity.note_failure(topic.name, key, 1, MARKUP, 60.0)
    report(gate)
    seen = see(Access(MARKUP, "all"))
    for path in (
        "now",
        "topic/jobs",
        "dead/jobs",
        "key?values=1&key=" + quote(key, safe=""),
        "processes",
        "audit",
    ):
        tab = seen.go(path)
        expect(tab.locator("main")).to_contain_text("onerror")
        assert tab.locator("img, main script").count() == 0
        assert "owned" not in re.sub(re.escape(MARKUP), "", tab.title())
        assert "\u202e" not in tab.locator("main").inner_text()
    use(seen, Mouse, ("topic", "peek", "jobs", "other", "--values"))
    assert seen.tab.locator("img, main script").count() == 0
    # A script that is put into the page does not run, and no text becomes markup
    blocked = seen.tab.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return 'made' } catch (error) { return error.name } }"
    )
    assert blocked == "TypeError"
    seen.wrong[:] = [one for one in seen.wrong if "TrustedHTML" not in one]


@pytest.mark.slow
def test_a_page_of_another_site_reads_and_changes_nothing(
    filled: Gate, stored: Any, browser: Any, address: Callable[..., str]
) -> None:
    before, mine = stored(), address()
    with browser.new_context() as context:
        tab = context.new_page()
        tab.route("http://evil.test/", lambda route: route.fulfill(content_type="text/html", body="<p>evil"))
        tab.goto("http://evil.test/")
        statuses = list[int]()
        tab.on("response", lambda answer: statuses.append(answer.status) if answer.url.startswith(mine) else None)
        said = tab.evaluate(
            """async (mine) => {
                const json = '{"arguments": {"topic": "jobs"}}';
                const headers = { "x-idemgate": "1", "content-type": "application/json" };
                const tries = [
                    fetch(`${mine}api/snapshot`),
                    fetch(`${mine}api/verb/topic/pause`, { method: "POST", headers, body: json }),
                    fetch(`${mine}api/verb/topic/pause`, { method: "POST", mode: "no-cors", body: json }),
                ];
                return Promise.all(tries.map((one) => one.then((answer) => answer.type, (error) => error.name)));
            }""",
            mine,
        )
        assert said[:2] == ["TypeError", "TypeError"]  # they may not be read, or even sent
        # A form, which needs no permission of the other site
        form = f"<form method=post enctype=text/plain action='{mine}api/verb/topic/pause'><input name=x></form>"
        tab.evaluate("(form) => { document.body.innerHTML = form; document.forms[0].submit() }", form)
        expect(tab.locator("body")).to_contain_text("another site")
        assert {*statuses} <= {403, 404, 405}
        # Nor a frame
        tab.goto("http://evil.test/")
        tab.evaluate("(mine) => { document.body.innerHTML = `<iframe src=${mine}></iframe>` }", mine)
        tab.wait_for_timeout(500)
        assert all("Now" not in one.content() for one in tab.frames)
    assert stored() == before


# -- for all who read -------------------------------------------------------------------------------------------------

PATHS = ["now", "topic/jobs", "dead/jobs?window=all", "key?key=runs&values=1", "processes", "audit", "commands"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(filled: Gate, url: str, namespace: str, scheme: str, see: Callable[..., Seen]) -> None:
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 400)) as earlier:
        earlier.topic("jobs").pause("the database is down")
    filled.topic("jobs").trigger("due", 1)
    filled.context.activity.note_failure("jobs", "due", 1, "an error", 60.0)
    serve(filled, "jobs")
    seen = see(color_scheme=scheme)
    use(seen, Mouse, ("topic", "move", "jobs", "waits", "--delay", "2h"))
    for path in PATHS:
        tab = seen.go(path)
        tab.wait_for_timeout(500)
        tab.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        check(tab, path)
        tab.set_viewport_size({"width": 390, "height": 844})  # of a telephone: tables scroll, the page does not
        assert tab.evaluate("document.documentElement.scrollWidth") == 390, path
        tab.set_viewport_size({"width": 1280, "height": 720})
    tab.get_by_role("button", name="Forget").first.click()
    check(tab, "a form")
    tab.locator("#form [name=key]").fill("done")
    tab.get_by_role("button", name="Look first").click()
    expect(tab.get_by_label("to confirm")).to_be_visible()
    check(tab, "a form that was looked at")
    login = see(None, color_scheme=scheme)
    check(login.go("now"), "log in")
    login.wrong[:] = [one for one in login.wrong if "401" not in one]


def check(tab: Any, what: str) -> None:
    found = Axe().run(tab).response["violations"]
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == [], what


# -- a system that lives ----------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, random, sys
from idemgate import Gate
from idemgate.presence import presence

presence.FIRST_AFTER = 0.2
gate = Gate(os.environ["URL"], namespace=os.environ["NAMESPACE"])
images = gate.topic("images", window="1s")
mails = gate.topic("mails", concurrency=6, max_attempts=3, backoff="500ms")
orders = gate.topic("orders", group_concurrency=1)

@images.handler
async def resize(delivery):
    await asyncio.sleep(random.expovariate(20))

@mails.handler
async def send(delivery):
    await asyncio.sleep(0.05)
    n = int(delivery.key.rpartition("-")[2])
    if n % 5 == 0:
        raise KeyError("address")
    if n % 7 == 0:
        raise TimeoutError(f"mail server {n % 3} did not answer in {n % 30} s")

@gate.once(key="{order}", scope="charge", retention="1h")
async def charge(order):
    await asyncio.sleep(0.02)
    return {"receipt": order, "total": 12.5}

@orders.handler
async def ship(delivery):
    await charge(delivery.key)
    await asyncio.sleep(600 if delivery.key == "order-0" else 0.1)

if sys.argv[1] == "work":
    gate.run()
else:
    import time
    orders.trigger("order-0", {"n": 0}, group="eu")
    for n in range(1, 100_000):
        images.trigger(f"picture-{random.randrange(200)}", {"width": n})
        mails.trigger(f"mail-{n}", {"to": f"user{n}@example.com"})
        if n % 3 == 0:
            orders.trigger(f"order-{n}", {"n": n}, group=random.choice(["eu", "us", "asia"]))
        time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_live_system_is_seen_and_steered(
    gate: Gate, url: str, namespace: str, tmp_path: Path, see: Callable[..., Seen]
) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM)
    environment = os.environ | {"URL": url, "NAMESPACE": namespace, "PYTHONPATH": str(ROOT)}
    running = list[subprocess.Popen[bytes]]()

    def start(what: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "shop.py", what]
        running.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL))
        return running[-1]

    try:
        workers = [start("work"), start("work")]
        start("send")
        seen = see()
        tab = seen.go("now")
        row = tab.locator("tr", has_text="mails")
        expect(row).to_contain_text(re.compile(r"[1-9]\d*/s"), timeout=30_000)
        expect(tab.locator(".spark")).to_have_count(3, timeout=30_000)
        expect(row).to_contain_text(re.compile("2 \N{MULTIPLICATION SIGN} "), timeout=30_000)
        expect(row).to_contain_text(re.compile("of 64"))
        # A worker that is killed is missed when its report has expired, and the other goes on
        workers[0].kill()
        use(seen, Mouse, ("topic", "pause", "mails"), "the provider is down")
        tab = seen.go("now")
        expect(tab.locator("tr", has_text="mails")).to_contain_text("paused")
        expect(tab.locator("tr", has_text="mails")).to_contain_text("1 \N{MULTIPLICATION SIGN} ", timeout=60_000)
        take_pictures(seen, see, gate)
        use(seen, Keyboard, ("topic", "resume", "mails"))
        expect(seen.go("now").locator("tr", has_text="mails")).not_to_contain_text("paused")
        found = len(gate.topic("mails").dead.list(1000))
        use(seen, Mouse, ("dead", "redrive", "mails", "--all"))
        assert found
    finally:
        for process in running:
            process.kill()
            process.wait(30)


def take_pictures(seen: Seen, see: Callable[..., Seen], gate: Gate) -> None:
    """Write the pictures of the docs, if a folder is given."""
    if PICTURES is None:
        return
    folder = ROOT / PICTURES
    folder.mkdir(exist_ok=True)
    dark = see(color_scheme="dark")
    for name, path, tab in [
        ("now", "now", seen),
        ("topic", "topic/orders", seen),
        ("dead", "dead/mails", dark),
        ("key", "key?key=order-0", seen),
    ]:
        tab.tab.set_viewport_size({"width": 1280, "height": 760})
        shown = tab.go(path)
        shown.wait_for_timeout(12_000 if name == "now" else 2_500)
        if name == "dead":
            shown.locator("details.group summary").first.click()
        shown.screenshot(path=folder / f"{name}.png")


# -- from the wheel ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_serves_the_page_without_a_network(browser: Any, url: str, namespace: str, tmp_path: Path) -> None:
    # Given a wheel, unpacked beside nothing of the checkout
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(wheel, check=True, timeout=300)
    [built] = tmp_path.glob("*.whl")
    home = tmp_path / "home"
    shutil.unpack_archive(built, home, "zip")
    assert {path.name for path in (home / "idemgate/ui/static/vendor").iterdir()} == {
        "LICENSE",
        "SOURCE.txt",
        "lit-html.js",
    }
    # When its command runs with no proxy and no name server
    words = [sys.executable, "-c", "from idemgate.cli import main; main()", "ui", "--url", url, "--listen", "0"]
    with subprocess.Popen(
        [*words, "--namespace", namespace],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            seen = Seen(browser, process.stdout.readline().strip())
            # Then the page loads from it alone
            expect(seen.go("now").locator("main")).to_contain_text("The store holds no topic.")
            seen.close()
        finally:
            process.terminate()


def test_the_library_of_the_page_is_the_published_file() -> None:
    vendor = ROOT / "idemgate/ui/static/vendor"
    assert hashlib.sha256((vendor / "lit-html.js").read_bytes()).hexdigest() in (vendor / "SOURCE.txt").read_text()


def test_no_file_of_the_page_makes_markup_of_texts_or_names_another_site() -> None:
    for file in (ROOT / "idemgate/ui/static").glob("*"):
        if file.is_file():
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(
                "innerHTML|outerHTML|insertAdjacentHTML|unsafe|eval\\(|document.write|https?://", text
            ), file
