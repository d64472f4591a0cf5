"""`idemgate ui`: the page for operators, on this machine or behind tokens."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from pathlib import Path

from idemgate.cli.arguments import add_namespace, add_url, split_address, url_of
from idemgate.cli.signals import watching
from idemgate.cli.verbs import who_runs
from idemgate.errors import InvalidArgument, NotConfigured
from idemgate.gate import Gate
from idemgate.worker.logs import configure_logs

__all__ = ["add_to"]

DESCRIPTION = """\
Serve the page for operators until Ctrl-C or SIGTERM: what is wrong, topics, dead letters, keys, processes, and all
commands. Without --tokens only this machine reaches it, and all its users may do what the access list of the store
allows. A file of tokens names people and what they may do. The connection is not encrypted: for other machines use a
tunnel of ssh, or a proxy with TLS."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    add_url(parser)
    add_namespace(parser)
    parser.add_argument(
        "--listen", metavar="[HOST:]PORT", default="7717", help="where to listen (default: 127.0.0.1:7717)"
    )
    parser.add_argument(
        "--tokens", metavar="FILE", type=Path, help="a line for each person: NAME all|read TOKEN, of 20 characters"
    )
    parser.add_argument(
        "--host", metavar="NAME", action="append", default=[],
        help="a host name under which browsers reach the page, beside localhost; may be repeated",
    )  # fmt: skip
    parser.set_defaults(command=serve)


def serve(options: argparse.Namespace) -> int:
    """Serve the page; return 0 after a signal."""
    try:
        from idemgate.ui import Access, app
        from idemgate.ui.access import everyone, read_tokens
        from idemgate.ui.server import serve_until_signal
        from idemgate.ui.shield import LOCAL
    except ModuleNotFoundError as error:
        raise NotConfigured(f"the page needs the extra `ui` ({error}): pip install '.[ui]'") from None
    host, port = split_address("--listen", options.listen)
    if options.tokens is None and not _is_loopback(host):
        raise InvalidArgument("--listen", options.listen, "other machines reach it", "Give --tokens FILE, or no host")
    access = everyone(Access(who_runs(), "all")) if options.tokens is None else read_tokens(options.tokens)
    listening = _listen(host, port, options.listen)
    configure_logs("info")
    with watching(), listening, Gate(url_of(options), namespace=options.namespace, presence=False) as gate:
        # 0.0.0.0 is no name for a browser: other sites would use it to reach this machine.
        own = [*options.host, "localhost"][0] if host in _ALL else host
        page = app(gate, access=access, hosts=[*LOCAL, own, *options.host])
        print(f"http://{f'[{own}]' if ':' in own else own}:{listening.getsockname()[1]}/", flush=True)
        print("Ctrl-C ends it", file=sys.stderr)
        serve_until_signal(page, listening)  # it raises the signal again when it has stopped; `watching` notes it
    return 0


_ALL = ("0.0.0.0", "::")  # noqa: S104 - the user names them


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"cannot listen there: {error.strerror or error}"
        raise InvalidArgument("--listen", address, problem, "Name another") from error
