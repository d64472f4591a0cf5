"""The routes of the page: each verb does what its command does, and nobody does more than they may."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
starlette = pytest.importorskip("starlette", reason="the extra `ui` is not installed")

from starlette.applications import Starlette  # noqa: E402
from starlette.routing import Mount  # noqa: E402

from idemgate import Gate, Trigger  # noqa: E402
from idemgate.audit.running import verb_line  # noqa: E402
from idemgate.core.activity import TopicTimes  # noqa: E402
from idemgate.errors import InvalidArgument  # noqa: E402
from idemgate.operate.acts import describe_act  # noqa: E402
from idemgate.operate.arguments import parse_given, read_command  # noqa: E402
from idemgate.operate.overview import overview  # noqa: E402
from idemgate.operate.table import VERBS  # noqa: E402
from idemgate.ui import CHANGES as CHANGING  # noqa: E402
from idemgate.ui import READS as READING  # noqa: E402
from idemgate.ui import Access, app  # noqa: E402
from idemgate.ui.access import read_tokens  # noqa: E402
from tests.audit.test_running import CASES  # noqa: E402
from tests.for_each import for_each  # noqa: E402
from tests.operate.conftest import SEARCHES, Command, sent  # noqa: E402
from tests.operate.test_status import serve  # noqa: E402
from tests.operate.test_verbs import CHANGES, HELD, READS, SCANNING, Case, acts, words_of  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.one_in(3)

MAY_ALL = Access("ann@example.com", "all")
CSRF = {"x-idemgate": "1"}
Ask = Callable[..., Any]


class Page:
    """The app of a gate, and requests to it."""

    def __init__(self, asgi: Any) -> None:
        self.app = asgi

    def ask(self, method: str, path: str, host: str = "localhost", **request: Any) -> Any:
        async def send() -> Any:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.request(method, path, **request)

        return asyncio.run(send())

    def do(self, words: str | tuple[str, ...], *, headers: Any = CSRF, **body: Any) -> Any:
        """Send the request for a command."""
        found = read_command(shlex.join(["idemgate", *(words.split() if isinstance(words, str) else words)]))
        assert found is not None
        verb, arguments = found
        path = f"/api/verb/{verb.noun}/{verb.name}"
        if not verb.changes:
            query = {name: "true" if value is True else value for name, value in arguments.items()}
            return self.ask("GET", path, params=query)
        if "file" in arguments:
            arguments["file"] = Path(arguments["file"]).read_text()
        if verb.loses and "confirm" not in body:
            body["confirm"] = arguments[verb.subject or ""]
        return self.ask("POST", path, json={"arguments": arguments, **body}, headers=headers)


Open = Callable[..., Page]


@pytest.fixture
def page(url: str, namespace: str) -> Iterator[Open]:
    """`page(Access("ann", "read"), as_user=url)`: the page of the test's namespace."""
    gates = list[Gate]()

    def make(access: Access | None = MAY_ALL, as_user: str = url, **options: Any) -> Page:
        gates.append(Gate(as_user, namespace=namespace, presence=False))
        return Page(app(gates[-1], access=lambda _: access, **options))

    yield make
    for gate in gates:
        gate.close()


def constant(answer: Any) -> Any:
    """An answer without what changes while time passes."""
    if isinstance(answer, dict):
        return {k: constant(v) for k, v in answer.items() if not k.endswith("_left") and k != "lateness"}
    return [constant(one) for one in answer] if isinstance(answer, list) else answer


# -- each verb --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", CHANGES, ids=lambda one: " ".join(one.words))
def test_a_change_is_the_same_by_command_and_by_request(
    command: Command, page: Open, filled: Gate, users: Any, stored: Any, one: Case
) -> None:
    mine = page(as_user=users("operator", *SCANNING.get(one.words[:2], ())))
    # When it is only looked at, Then it shows what the command shows, and nothing is written
    before = stored()
    looked = mine.do(one.words, dry_run=True)
    assert constant(looked.json()) == constant(json.loads(command(*one.words, "--dry-run", "--json").out))
    assert (looked.status_code, stored()) == (200, before)
    # When it is made, Then it does what the command does
    made = mine.do(one.words, why="a reason")
    assert made.status_code == 200, made.text
    assert one.answer.items() <= made.json().items()
    assert one.effect(filled)
    # And it stands in the list of acts, with who asked, as the command writes it
    [act] = acts(filled)
    assert (act["who"], act["why"]) == ("ann@example.com", "a reason")
    assert act["what"].split()[:3] == list(one.words[:3])
    assert '{"n":9}' not in act["what"]


@pytest.mark.parametrize("one", CHANGES, ids=lambda one: " ".join(one.words))
def test_what_somebody_may_not_do_is_refused_and_nothing_is_written(
    page: Open, filled: Gate, users: Any, stored: Any, one: Case
) -> None:
    before = stored()
    # By the access list of the server
    refused = page(as_user=users("viewer")).do(one.words)
    assert refused.status_code == 403
    assert "access list" in refused.json()["error"]["message"]
    # By the page
    title = " ".join(one.words[:2])
    for access in (Access("bob", "read"), Access("bob", {*READING, *CHANGING} - {title})):
        for dry_run in (True, False):
            refused = page(access).do(one.words, dry_run=dry_run)
            assert refused.status_code == 403
            assert refused.json()["error"]["message"] == f"bob may not `{title}`"
    assert page(None).do(one.words).status_code == 401
    assert stored() == before


@pytest.mark.parametrize("words", READS)
def test_a_verb_that_reads_shows_what_its_command_shows(
    command: Command, page: Open, filled: Gate, users: Any, stored: Any, words: str
) -> None:
    before = stored()
    asked = page(Access("bob", "read"), as_user=users("viewer")).do(words)
    assert asked.status_code == 200, asked.text
    assert constant(asked.json()) == constant(json.loads(command(*words.split(), "--json").out))
    assert asked.headers["cache-control"] == "no-store"
    title = " ".join(words.split()[:2])
    assert page(Access("bob", {*READING, *CHANGING} - {title})).do(words).status_code == 403
    assert page(None).do(words).status_code == 401
    assert stored() == before


def test_the_other_verbs_that_read(command: Command, page: Open, filled: Gate, users: Any) -> None:
    export = ("dead", "export", "jobs")
    asked = page(Access("bob", "read")).do(export)
    assert asked.headers["content-type"].startswith("application/x-ndjson")
    assert asked.text == command(*export).out
    assert page().do(("dead", "export", "nothing")).status_code == 400
    both = page(as_user=users("operator", "auditor")).do(HELD).json()
    assert sorted(row["key"] for row in both) == ["held", "held too"]
    assert "Those that report: none" in page().do("worker show host:1").json()["error"]["message"]


def test_a_set_allows_its_verbs_only(page: Open, filled: Gate) -> None:
    mine = page(Access("bob", {"topic ls", "topic pause"}))
    assert mine.do("topic ls").status_code == 200
    assert mine.do("topic pause jobs").json() == {"topic": "jobs", "paused": True}
    assert mine.do("topic resume jobs").status_code == 403
    assert mine.do("topic show jobs").status_code == 403


# -- the table for the page -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["operator", "viewer"])
def test_the_page_learns_which_verbs_it_may_offer(page: Open, filled: Gate, users: Any, stored: Any, role: str) -> None:
    before = stored()
    facts = page(as_user=users(role)).ask("GET", "/api/verbs").json()
    assert (facts["who"], facts["read_only"]) == ("ann@example.com", role == "viewer")
    offered = {f"{one['noun']} {one['name']}" for one in facts["verbs"] if one["allowed"]}
    assert offered == (READING if role == "viewer" else READING | CHANGING)
    assert {one["subject"] for one in facts["verbs"] if one["loses"]} == {"key", "to", "topic"}
    assert stored() == before
    limited = page(Access("bob", {"topic pause"}), as_user=users(role)).ask("GET", "/api/verbs").json()
    assert [one["name"] for one in limited["verbs"] if one["allowed"]] == ([] if role == "viewer" else ["pause"])


# -- the snapshot -----------------------------------------------------------------------------------------------------


def test_the_snapshot_shows_what_status_finds_and_the_verb_that_mends_it(
    command: Command, page: Open, filled: Gate
) -> None:
    mine = page(Access("bob", {"dead redrive"}))
    facts = mine.ask("GET", "/api/snapshot").json()
    status = json.loads(command("status", "--json").out)
    assert [one["id"] for one in facts["findings"]] == [one["id"] for one in status["findings"]]
    [jobs] = [one for one in facts["topics"] if one["topic"] == "jobs"]
    assert (jobs["scheduled"], jobs["in_flight"], jobs["dead"], jobs["state"]) == (2, 1, 2, "working")
    assert (jobs["accepted"], jobs["ended"], jobs["handling"]) == (6, 3, None)
    # When the verb of a finding is sent, Then the finding is gone
    [dead] = [one for one in facts["findings"] if one["id"] == "dead-letters"]
    assert dead["verb"] == {"title": "dead redrive", "arguments": {"topic": "jobs", "reason": "ValueError"}}
    redriven = mine.ask("POST", "/api/verb/dead/redrive", json={"arguments": dead["verb"]["arguments"]}, headers=CSRF)
    assert redriven.json() == {"topic": "jobs", "redriven": 2}
    after = mine.ask("GET", "/api/snapshot").json()
    assert "dead-letters" not in {one["id"] for one in after["findings"]}


ODD = ("-t", "a b", "o'brien", "größe", "$HOME", "--", "x\x1b[31m", "tab\tkey", "\u202e", "\U000e0001", "", "a=b")


def test_the_page_shows_commands_as_findings_and_acts_show_them(page: Open) -> None:
    bury = next(one for one in VERBS if one.title == "topic bury")
    mine = page(Access("bob", "read"))

    def ask(verb: str, given: Any, asked: Page = mine) -> Any:
        return asked.ask("POST", f"/api/command/{verb}", json={"arguments": given}, headers=CSRF)

    for key, group in zip(ODD, reversed(ODD), strict=True):
        given = {"topic": "jobs", "key": key, "group": group}
        line = verb_line("topic", "bury", "jobs", key, group=group)
        assert ask("topic/bury", given).json() == line == f"idemgate {describe_act(bury, given)}"
    # What is not complete, or wrong, is shown, too
    assert ask("dead/redrive", {"all": True, "ids": []}).json() == "idemgate dead redrive --all"
    assert (
        ask("dead/redrive", {"topic": None, "ids": ["-1", 2], "all": False}).json() == "idemgate dead redrive -- -1 2"
    )
    assert ask("dead/redrive", {"topic": 3, "ids": 4, "x": 5}).json() == "idemgate dead redrive 3 4"
    assert ask("dead/redrive", []).status_code == 400
    assert ask("dead/raise", {}).status_code == 404
    assert ask("dead/redrive", {}, page(None)).status_code == 401


@for_each("kind", CASES)
def test_each_finding_of_what_runs_has_a_verb(kind: str) -> None:
    for there, _ in CASES[kind]:
        [found] = overview(there)["findings"]
        [verb] = [one for one in VERBS if one.title == found["verb"]["title"]]
        assert found["mend"].startswith(f"idemgate {verb.title}")
        parse_given(verb, found["verb"]["arguments"])


def test_a_snapshot_that_has_not_changed_is_not_sent_again(
    page: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.ui.api.FRESH", -1.0)
    monkeypatch.setattr("idemgate.operate.snapshot._Taking._read_servers", lambda _: {})
    topic = gate.topic("jobs")
    topic.trigger("later", delay="1h")
    mine = page()
    first = mine.ask("GET", "/api/snapshot")
    again = mine.ask("GET", "/api/snapshot", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    topic.trigger("another", delay="1h")
    changed = mine.ask("GET", "/api/snapshot", headers={"if-none-match": first.headers["etag"]})
    assert (changed.status_code, changed.json()["topics"][0]["scheduled"]) == (200, 2)


def test_no_screen_searches_for_keys(page: Open, filled: Gate, raw: Any) -> None:
    serve(filled, "jobs")
    mine = page()

    def draw() -> None:
        assert mine.ask("GET", "/api/snapshot").status_code == 200
        for words in (
            "topic show jobs",
            "worker ls --of jobs",
            "dead ls jobs --limit 1000",
            "key show waits",
            "act ls",
        ):
            assert mine.do(words).status_code == 200

    commands = sent(raw, draw)
    assert "EVALSHA" in commands
    assert not commands & SEARCHES


def test_all_who_ask_within_a_second_share_a_snapshot(page: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemgate.ui.api.FRESH", 3600.0)
    gate.topic("jobs").open()
    mine = page()
    first = mine.ask("GET", "/api/snapshot").json()
    assert mine.ask("GET", "/api/snapshot").json() == first
    # A change on the page is seen at once
    assert mine.do("topic pause jobs").status_code == 200
    assert mine.ask("GET", "/api/snapshot").json()["topics"][0]["state"] == "paused"


def test_a_topic_is_described_in_words_and_by_its_handlers(page: Open, gate: Gate) -> None:
    for name in ("idle", "late", "limited", "scheduled", "unserved"):
        gate.topic(name, concurrency=1).trigger_many([Trigger("a"), Trigger("b")] if name != "scheduled" else [])
    gate.topic("scheduled").trigger("a", delay="1h")
    for name in ("idle", "limited"):
        gate.topic(name).take(1)
    gate.topic("limited").trigger("c")
    gate.topic("idle").delete(discard=True)
    gate.topic("idle").open()
    # Given a hundred handlers of 20 ms, one of 2 s, and two of ten minutes
    times = gate.context.activity.topics.setdefault("late", TopicTimes())
    for seconds, n in ((0.02, 100), (2.0, 1), (600.0, 2)):
        for _ in range(n):
            times.handling.add(seconds)
    serve(gate, "late", places=7)
    rows = {one["topic"]: one for one in page().ask("GET", "/api/snapshot").json()["topics"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "idle": "idle", "late": "waiting", "limited": "at its limit: 1 of 1", "scheduled": "scheduled",
        "unserved": "no process takes",
    }  # fmt: skip
    late = rows["late"]
    assert (late["handling"], late["lateness"]) == ({"p50": 0.03, "p99": None}, None)
    assert (late["busy"], late["places"], [*late["versions"].values()]) == (0, 7, [1])


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "topic pause nothing": "no such topic in the store. There are: empty, jobs",
    "topic reshard jobs 0": "is not a whole number of at least 1",
    "topic move jobs waits": "Give --at or --delay",
    "topic move jobs waits --at 2026-12-24T18:00": "has no offset. Add Z for UTC, or +01:00",
    "topic move jobs waits --delay soon": "delay='soon'",
    "topic trigger jobs new --payload {n:1}": "is not JSON",
    "key forget twice": "several scopes have this key. Name one: claim, first",
    "dead redrive jobs": "or --all",
    "dead rm jobs --all --limit 1.5": "limit='1.5'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_done_is_an_error_with_the_reason(page: Open, filled: Gate, stored: Any, words: str) -> None:
    before = stored()
    refused = page().do(words)
    assert refused.status_code == 400
    assert REFUSED[words] in refused.json()["error"]["message"]
    assert stored() == before


BODIES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not JSON"),
    "no object": ([], "not an object"),
    "an unknown part": ({"yes": True}, "not a part of a request"),
    "a dry run that is no bool": ({"dry_run": "yes"}, "not a part of a request"),
    "a missing argument": ({}, "topic=None: is missing"),
    "an unknown argument": ({"arguments": {"name": "jobs"}}, "It has: topic"),
    "a number": ({"arguments": {"topic": 7}}, "Send a text"),
    "a nested one": ({"arguments": {"topic": {"jobs": 1}}}, "Send a text"),
}


@pytest.mark.parametrize("one", BODIES)
def test_a_request_that_is_wrong_is_refused(page: Open, filled: Gate, stored: Any, one: str) -> None:
    before = stored()
    body, problem = BODIES[one]
    content = body if isinstance(body, str) else json.dumps(body)
    refused = page().ask("POST", "/api/verb/topic/pause", content=content, headers=CSRF)
    assert refused.status_code == 400
    assert problem in refused.json()["error"]["message"]
    assert stored() == before


def test_a_request_may_not_be_too_large(page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemgate.ui.api.MOST_BYTES", 100)
    refused = page().ask("POST", "/api/verb/topic/pause", content=b" " * 101, headers=CSRF)
    assert (refused.status_code, "command line" in refused.json()["error"]["message"]) == (413, True)


@pytest.mark.parametrize("one", [one for one in CHANGES if words_of(one.words)[-1] == "--yes"], ids=lambda one: one[0])
def test_what_loses_data_wants_the_name_typed(page: Open, filled: Gate, stored: Any, one: Case) -> None:
    before = stored()
    for typed in ("", "yes", "JOBS"):
        refused = page().do(one.words, confirm=typed)
        assert refused.status_code == 400
        assert re.search("Look with dry_run, then send the (key|to|topic) again", refused.json()["error"]["message"])
    assert stored() == before


def test_a_verb_that_changes_something_cannot_be_asked_for_by_a_link(page: Open, filled: Gate, stored: Any) -> None:
    before = stored()
    for method, path, status in [
        ("GET", "/api/verb/topic/pause?topic=jobs", 405), ("POST", "/api/verb/topic/ls", 405),
        ("POST", "/api/verb/topic/stop", 404), ("GET", "/api/nothing", 404), ("GET", "/../secret", 404),
    ]:  # fmt: skip
        refused = page().ask(method, path, headers=CSRF)
        assert (refused.status_code, "error" in refused.json()) == (status, True)
    assert stored() == before


def test_a_store_that_is_away_is_an_error(page: Open, three_tries: Any) -> None:
    with three_tries():
        away = page(as_user="redis://127.0.0.1:1")
        assert away.ask("GET", "/api/snapshot").status_code == 503
        assert away.ask("GET", "/api/verbs").json()["read_only"] is False


# -- security ---------------------------------------------------------------------------------------------------------

FOREIGN: dict[str, tuple[str, dict[str, str]]] = {
    "another host": ("evil.example", {}),
    "a host that begins like one": ("localhost.evil.example", {}),
    "another site": ("localhost", {"sec-fetch-site": "cross-site"}),
    "another port of the host": ("localhost", {"sec-fetch-site": "same-site"}),
    "another origin": ("localhost", {"origin": "http://evil.example"}),
    "an origin of another port": ("localhost", {"origin": "http://localhost:81"}),
    "a page of a file": ("localhost", {"origin": "null"}),
}


@pytest.mark.parametrize("one", FOREIGN)
def test_a_request_of_another_site_is_refused(page: Open, filled: Gate, stored: Any, one: str) -> None:
    before = stored()
    host, headers = FOREIGN[one]
    body = json.dumps({"arguments": {"topic": "jobs"}})
    for method, path in [("POST", "/api/verb/topic/pause"), ("GET", "/api/snapshot")]:
        refused = page().ask(method, path, host, headers=CSRF | headers, content=body)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "Refused")
    assert stored() == before


def test_a_change_needs_the_header_that_no_form_can_send(page: Open, filled: Gate, stored: Any) -> None:
    before = stored()
    refused = page().do("topic pause jobs", headers={})
    assert (refused.status_code, stored()) == (403, before)
    assert "x-idemgate: 1" in refused.json()["error"]["message"]
    for site in ("same-origin", "none"):
        headers = CSRF | {"sec-fetch-site": site, "origin": "http://localhost"}
        assert page().do("topic pause jobs", headers=headers).status_code == 200


def test_a_link_of_another_site_leads_to_the_page(page: Open) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert page().ask("GET", "/", headers=headers).status_code == 200
    assert page().ask("POST", "/api/verb/topic/pause", headers=CSRF | headers).status_code == 403


def test_each_answer_forbids_what_the_page_does_not_need(page: Open) -> None:
    for path, host in [("/", "localhost"), ("/api/verbs", "localhost"), ("/nothing", "localhost"), ("/", "evil")]:
        headers = page().ask("GET", path, host).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_other_hosts_are_named(page: Open, gate: Gate) -> None:
    mine = page(hosts=["ops.example.com", "[fd00::7]"])
    assert mine.ask("GET", "/api/verbs", "OPS.example.com:8080").status_code == 200
    assert mine.ask("GET", "/api/verbs", "[fd00::7]:81").status_code == 200
    assert mine.ask("GET", "/api/verbs", "localhost").status_code == 403
    for host in ("ops.example.com:80", "http://ops.example.com", ""):
        with pytest.raises(InvalidArgument, match="names without a port"):
            page(hosts=[host])


def test_tokens_name_people_and_what_they_may_do(gate: Gate, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# people\n\nann all ann-has-a-long-token-0\nbob read bob-has-a-long-token-0\n")
    gate.topic("jobs").open()
    mine = Page(app(gate, access=read_tokens(file)))
    ann, bob = ({"authorization": f"Bearer {name}-has-a-long-token-0"} for name in ("ann", "bob"))
    assert mine.do("topic pause jobs", headers=CSRF | ann).status_code == 200
    assert mine.do("topic resume jobs", headers=CSRF | bob).status_code == 403
    assert mine.ask("GET", "/api/verbs", headers=bob).json()["who"] == "bob"
    assert [act["who"] for act in acts(gate)] == [gate.topic("jobs").stats().paused.by] == ["ann"]
    # Without one, or with one elsewhere, nothing is shown
    wrong = [{}, {"authorization": "Bearer ann"}, {"authorization": "Basic ann-has-a-long-token-0"}]
    for headers in wrong:
        refused = mine.ask("GET", "/api/snapshot?token=ann-has-a-long-token-0", headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")


@for_each(
    ("text", "problem"),
    {
        "": "has no token",
        "ann all": "NAME all|read TOKEN",
        "ann some ann-has-a-long-token-0": "NAME all|read TOKEN",
        "ann all hunter2 that is long": "NAME all|read TOKEN",
        "ann all hunter2": "less than 20 characters",
    }.items(),
)
def test_a_file_of_tokens_that_is_wrong(tmp_path_factory: Any, text: str, problem: str) -> None:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(problem)) as raised:
        read_tokens(file)
    assert "hunter2" not in str(raised.value)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_tokens(file / "nowhere")


# -- as an app of others ----------------------------------------------------------------------------------------------


def test_another_app_mounts_it_and_decides_who_may_do_what(gate: Gate) -> None:
    gate.topic("jobs").open()

    async def access(request: Any) -> Access | None:
        name = request.headers.get("x-user")
        return Access(name, "all") if name == "ann" else Access(name) if name else None

    mine = Page(Starlette(routes=[Mount("/ops", app(gate, access=access))]))
    assert mine.ask("GET", "/ops/").status_code == 200
    ann = CSRF | {"x-user": "ann"}
    pause = {"json": {"arguments": {"topic": "jobs"}}}
    assert mine.ask("POST", "/ops/api/verb/topic/pause", headers=ann, **pause).status_code == 200
    assert mine.ask("POST", "/ops/api/verb/topic/pause", headers=ann | {"x-user": "bob"}, **pause).status_code == 403
    assert mine.ask("GET", "/ops/api/snapshot").status_code == 401
    assert [act["who"] for act in acts(gate)] == ["ann"]


@pytest.mark.parametrize(
    ("access", "problem"), [(Access("bob", {"topic stop"}), "no such verbs"), ("all", "Return idemgate.ui.Access")]
)
def test_an_access_that_is_wrong_fails_each_request(gate: Gate, access: Any, problem: str) -> None:
    mine = Page(app(gate, access=lambda _: access))
    if isinstance(access, Access):
        assert problem in mine.ask("GET", "/api/snapshot").json()["error"]["message"]
    else:
        with pytest.raises(TypeError, match=problem):
            mine.ask("GET", "/api/snapshot")


def test_a_function_decides_how_stored_values_are_shown(page: Open, filled: Gate) -> None:
    def show(fact: str, value: Any) -> Any:
        return f"{fact} of {len(json.dumps(value))} characters" if value != 1 else 1 / 0

    mine = page(format=show)
    [message] = mine.do("topic peek jobs waits --values").json()["messages"]
    assert message["payload"] == "payload of 8 characters"
    [record] = mine.do("key show twice --values --scope claim").json()["records"]
    assert record["value"] == "value of 8 characters"
    [message] = mine.do("topic peek jobs grouped --values").json()["messages"]
    assert message["payload"] == "<format= raised ZeroDivisionError>"


# -- commands that are read -------------------------------------------------------------------------------------------


@for_each(
    "line",
    [
        "redis-cli CONFIG SET x y", "idemgate doctor", "idemgate topic", "idemgate topic pause a b",
        r"idemgate topic pause $'\U0000001b'", "",
    ],
)  # fmt: skip
def test_a_command_that_is_no_verb_has_no_button(line: str) -> None:
    assert read_command(line) is None


def test_names_that_look_like_options_are_read() -> None:
    found = read_command("idemgate topic bury --group=-v -- jobs --group")
    assert found is not None
    assert parse_given(*found) == {"topic": "jobs", "key": "--group", "group": "-v"}


def test_a_flag_without_its_value_is_missing() -> None:
    found = read_command("idemgate dead ls jobs --reason")
    assert found is not None
    assert parse_given(*found)["reason"] is None


def test_each_verb_that_loses_data_has_a_subject() -> None:
    assert all(verb.subject for verb in VERBS if verb.loses)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listen", ["0", *([pytest.param("127.0.0.2:0", marks=pytest.mark.slow)] if sys.platform == "linux" else [])]
)
def test_the_command_serves_the_page_until_a_signal(gate: Gate, url: str, namespace: str, listen: str) -> None:
    gate.topic("jobs").open()
    words = [sys.executable, "-m", "idemgate", "ui", "--url", url, "--namespace", namespace, "--listen", listen]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            assert httpx.get(f"{address}api/snapshot", trust_env=False).json()["topics"][0]["topic"] == "jobs"
            posted = httpx.post(
                f"{address}api/verb/topic/pause", json={"arguments": {"topic": "jobs"}}, headers=CSRF, trust_env=False
            )
            assert posted.json() == {"topic": "jobs", "paused": True}
            assert "<title>" in httpx.get(address, trust_env=False).text
        finally:
            process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert (process.returncode, "operate.act" in logged) == (0, True)
    assert re.match(r".+@.+", acts(gate)[0]["who"])


@pytest.mark.slow
def test_a_signal_interrupts_a_redrive_that_the_same_command_goes_on_with(
    gate: Gate, url: str, namespace: str, page: Open
) -> None:
    # Given a redrive that would take a minute
    topic = gate.topic("jobs")
    topic.trigger_many([Trigger(f"k{n}", n) for n in range(60)])
    for delivery in topic.take(60):
        topic.bury(delivery, reason="why")
    words = [sys.executable, "-m", "idemgate", "ui", "--url", url, "--namespace", namespace, "--listen", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        asked = {"json": {"arguments": {"topic": "jobs", "all": True, "rate": "1/1s"}}, "headers": CSRF}
        sender = threading.Thread(target=_post, args=(f"{address}api/verb/dead/redrive", asked))
        sender.start()
        wait_until(lambda: topic.stats().dead < 60)
        # When the server gets a signal, Then it ends in time
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        sender.join(30)
    left = topic.stats().dead
    assert 0 < left < 60
    # And the same command moves the rest
    assert page().do("dead redrive jobs --all").json()["redriven"] == left


def _post(address: str, asked: dict[str, Any]) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(address, trust_env=False, timeout=60, **asked)


def test_the_command_refuses_to_be_open_to_all(command: Command, tmp_path: Path) -> None:
    open_to_all = command("ui", "--listen", "0.0.0.0:0")
    assert (open_to_all.code, "Give --tokens FILE" in open_to_all.err) == (2, True)
    assert "cannot be read" in command("ui", "--tokens", str(tmp_path / "none")).err
    assert "not a port" in command("ui", "--listen", "localhost").err


def test_the_command_names_the_extra_that_it_needs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "idemgate.ui", None)  # type: ignore[arg-type]
    without = command("ui")
    assert (without.code, "pip install '.[ui]'" in without.err) == (2, True)
