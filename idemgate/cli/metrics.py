"""`idemgate metrics`: the metrics of a namespace for Prometheus, by HTTP."""

from __future__ import annotations

import argparse
import threading
import time
from http import HTTPStatus

from idemgate.cli.arguments import add_namespace, add_url, url_of
from idemgate.cli.listener import Answer, listen
from idemgate.cli.signals import Interrupted, watching
from idemgate.gate import Gate
from idemgate.worker.logs import configure_logs

__all__ = ["add_to"]

DESCRIPTION = """\
Answer the scrapes of Prometheus at /metrics with what `idemgate status` knows of a namespace: its findings, topics and
processes. Each scrape takes a snapshot, as `idemgate status` does. It reads, and writes nothing. A user with the role
viewer may run it; the servers are judged only for one with the role auditor, too. One exporter serves a namespace. It
ends with Ctrl-C or SIGTERM. The metrics of a worker itself are at /metrics of `idemgate run --probe`."""
PORT = "9746"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    add_url(parser)
    add_namespace(parser)
    parser.add_argument(
        "--listen", metavar="[HOST:]PORT", default=PORT, help=f"where to listen (default: 127.0.0.1:{PORT})"
    )
    parser.set_defaults(command=export)


def export(options: argparse.Namespace) -> int:
    """Answer until a signal; return 0. A store that is away is a metric, and no error.

    Raises:
        NotConfigured: the extra is not installed, or no store is configured.
        InvalidArgument: the URL or the address is invalid, or another program has the port.
    """
    from idemgate.metrics import CONTENT_TYPE, StoreCollector, render_store  # late: the extra may be missing

    configure_logs()
    with watching() as signals, Gate(url_of(options), namespace=options.namespace, presence=False) as gate:
        _ = gate.context.endpoint  # an invalid URL ends it now
        collector = StoreCollector(gate)
        answers = {"/metrics": lambda: Answer(HTTPStatus.OK, CONTENT_TYPE, render_store(collector))}
        with listen("--listen", options.listen, answers) as server:
            host, port = str(server.server_address[0]), server.server_address[1]
            print(f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics", flush=True)
            threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="idemgate-metrics").start()
            try:
                while True:
                    signals.check()
                    time.sleep(0.1)
            except Interrupted:
                server.shutdown()
    return 0
