"""A payment that is sent three times and made once: `python example.py`. App, client and store are all in here.

The client speaks ASGI to the app, so no server is needed. With one: `uvicorn example:app`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from idemgate_http import IdempotencyKey

from idemgate import Gate

gate = Gate("embedded://", namespace="http-example")
payments: list[int] = []


async def shop(_scope: Any, receive: Any, send: Any) -> None:
    """Make a payment: any ASGI app, such as one of FastAPI."""
    order = json.loads((await receive())["body"])
    payments.append(order["amount"])
    body = json.dumps({"payment": len(payments)}).encode()
    headers = [(b"content-type", b"application/json"), (b"set-cookie", b"session=of-the-first")]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


app = IdempotencyKey(shop, gate=gate, caller=lambda request: request.headers["x-account"], required=True)


async def post(account: str, key: str | None, amount: int) -> None:
    """Send a payment and print the answer."""
    headers = [(b"x-account", account.encode())]
    if key is not None:
        headers.append((b"idempotency-key", f'"{key}"'.encode()))
    scope = {"type": "http", "method": "POST", "path": "/payments", "query_string": b"", "headers": headers}
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"amount": amount}).encode(), "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)
    start, body = messages
    names = [name.decode() for name, _ in start["headers"]]
    shown = [name for name in ("set-cookie", "idempotent-replayed", "retry-after") if name in names]
    answer = json.loads(body["body"])
    print(f"{account} key={key} amount={amount}: {start['status']} {answer.get('title', answer)} {shown or ''}")


async def main() -> None:
    await post("anna", "order-7", 5)
    await post("anna", "order-7", 5)  # a retry: the first answer, without the cookie
    await asyncio.gather(*[post("anna", "order-8", 6) for _ in range(3)])  # copies at the same time
    await post("anna", "order-7", 500)  # the same key for something else
    await post("bert", "order-7", 5)  # another caller
    await post("bert", None, 5)  # no key
    print("payments made:", payments)
    await gate.aio.close()


if __name__ == "__main__":
    asyncio.run(main())
    gate.close()
