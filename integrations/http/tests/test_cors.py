"""Pages of another origin: the preflight of a browser, and the headers that a page may send and read."""

from __future__ import annotations

import queue
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from idemgate_http import IdempotencyKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from idemgate import Gate
from integrations.http.tests.conftest import Client

ALLOWED = ["Content-Type", "Idempotency-Key", "X-Account"]
EXPOSED = ["Idempotent-Replayed", "Retry-After", "Location"]
ORIGIN = "http://127.0.0.1:7"


def build_shop(gate: Gate, payments: list[int], origin: str) -> Any:
    """Return a shop whose middlewares are added as the README says. All requests come through its second segment."""
    app = FastAPI()
    app.add_middleware(IdempotencyKey, gate=gate, caller=lambda request: request.headers["x-account"], required=True)
    app.add_middleware(
        CORSMiddleware, allow_origins=[origin], allow_methods=["POST"], allow_headers=ALLOWED, expose_headers=EXPOSED
    )

    @app.post("/{_prefix}/payments", status_code=201)
    async def pay(_prefix: str, request: Request, response: Response) -> dict[str, int]:
        payments.append((await request.json())["amount"])
        response.headers["Location"] = f"/payments/{len(payments)}"
        return {"payment": len(payments)}

    return app


def test_a_page_of_another_origin_may_send_the_key_and_read_the_mark(mount: Callable[..., Client], gate: Gate) -> None:
    payments: list[int] = []
    client = mount("uvicorn", build_shop(gate, payments, ORIGIN))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "idempotency-key,x-account"}
    preflight = client.send("OPTIONS", "/payments", None, {"origin": ORIGIN, "x-account": None} | asked)
    assert preflight.status_code == 200
    assert "Idempotency-Key" in preflight.headers["access-control-allow-headers"]
    bodies = [b'{"amount": 5}', b'{"amount": 5}', b'{"amount": 6}']
    answers = [client.post("k", "/payments", {"origin": ORIGIN}, content=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [201, 201, 422]
    for answer in answers:  # replays and problems, too
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-expose-headers"] == ", ".join(EXPOSED)
    assert payments == [5]


PAGE = """<!doctype html><script>
async function pay(url, key, amount) {
  const answer = await fetch(url, {
    method: "POST", body: JSON.stringify({amount}),
    headers: {"Content-Type": "application/json", "Idempotency-Key": JSON.stringify(key), "X-Account": "anna"},
  });
  const read = ["Idempotent-Replayed", "Location", "Retry-After"].map((name) => answer.headers.get(name));
  return [answer.status, ...read, (await answer.json()).payment ?? null];
}
(async () => {
  let found;
  try {
    found = [await pay("URL", "k", 5), await pay("URL", "k", 5), await pay("URL", "k", 6)];
  } catch (error) { found = String(error); }
  await fetch("done", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", "--no-proxy-server"]  # fmt: skip


@pytest.mark.slow
def test_a_browser_retries_a_payment(mount: Callable[..., Client], gate: Gate, tmp_path: Path) -> None:
    """Chromium sends the preflight itself, and hides the headers that the server does not expose."""
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium on this machine: apt-get install -y --no-install-recommends chromium")
    found: queue.Queue[Any] = queue.Queue()
    payments: list[int] = []
    target = ""

    async def page(request: Request) -> Response:
        return HTMLResponse(PAGE.replace("URL", target))

    async def report(request: Request) -> Response:
        found.put(await request.json())
        return Response()

    # Given a page of one server, and a shop on another that allows its origin
    site = mount("hypercorn", Starlette(routes=[
        Route("/{prefix}/", page), Route("/{prefix}/done", report, methods=["POST"])]))  # fmt: skip
    origin = site.url.rpartition("/")[0]
    target = mount("uvicorn", build_shop(gate, payments, origin)).url + "/payments"
    # When the page pays, retries and uses its key for another amount
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path}", f"{site.url}/"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            answers = found.get(timeout=60)
        finally:
            browser.terminate()
    # Then the browser sent it, and the page could read each answer
    assert answers == [[201, None, "/payments/1", None, 1], [201, "true", "/payments/1", None, 1], [422, *[None] * 4]]
    assert payments == [5]
