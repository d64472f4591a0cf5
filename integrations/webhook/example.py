"""A webhook to a receiver that is busy at first: `python example.py`. Server, sender and receiver are all in here."""

from __future__ import annotations

import asyncio

from idemgate_webhook import BadSignature, StandardWebhooks, Webhooks, new_secret

from idemgate import Gate

SECRET = new_secret()
gate = Gate("embedded://", namespace="webhook-example")
webhooks = Webhooks(gate, secret=SECRET, schedule=["200ms", "1s"], allow=["127.0.0.1"], https_only=False)
answers = iter([b"503 Service Unavailable\r\nRetry-After: 1", b"204 No Content"])
accepted = asyncio.Event()


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The other side: a web framework, usually."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    body = await reader.readexactly(int(headers["Content-Length"]))
    try:
        event = StandardWebhooks(SECRET).verify(headers, body)
    except BadSignature:
        answer = b"400 Bad Request"
    else:
        answer = next(answers)
        print(f"received {event.id}: {body.decode()}; answering {answer[:3].decode()}")
    writer.write(b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()
    if answer.startswith(b"2"):
        accepted.set()


async def main() -> None:
    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hooks"
    async with server, gate.aio.worker():
        for _ in range(3):
            receipt = await webhooks.aio.send("evt_17:acme", url, {"type": "order.paid", "data": {"order": 7}})
            print("sent:", receipt.status)
        await asyncio.wait_for(accepted.wait(), 30)
    for attempt in (await webhooks.aio.history("evt_17:acme")).attempts:
        print(f"attempt {attempt.number}: {attempt.status} after {attempt.ms} ms")
    await gate.aio.close()


asyncio.run(main())
gate.close()
