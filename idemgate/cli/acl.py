"""`idemgate acl ROLE...`: the access list of a user that may do what these roles need, and nothing else."""

from __future__ import annotations

import argparse
import sys

from idemgate.cli.acl_rules import ROLES, rule, user_name
from idemgate.cli.arguments import add_namespace

__all__ = ["add_to"]

DESCRIPTION = """\
Print the ACL SETUSER command that gives a user these roles and no others. Nothing is sent to a server. To apply it:

    idemgate acl worker --namespace shop | redis-cli

A new user has no password and cannot log in until you set one (ACL SETUSER shop-worker >password).
An existing user keeps its password. The command works on Redis 6.2 and later and on Valkey.

roles:
"""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION + "\n".join(f"  {name:<11} {role.about}" for name, role in ROLES.items())
    parser.add_argument("roles", metavar="ROLE", nargs="+", choices=ROLES, help="one or more of the roles below")
    add_namespace(parser)
    parser.add_argument(
        "--user", metavar="NAME", help="name of the user (default: the namespace and the roles, such as shop-worker)"
    )
    parser.add_argument(
        "--keys", metavar="GLOB", action="append", default=[],
        help="further keys: forward targets, streams, keys that expire; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--channels", metavar="GLOB", action="append", default=[], help="further channels; may be repeated"
    )
    parser.add_argument("--cluster", action="store_true", help="add the commands of a cluster client")
    parser.add_argument("--durable", action="store_true", help="add the commands of a gate with durability=")
    parser.add_argument(
        "--redis", choices=("6.2", "7.2"), default="6.2",
        help="oldest server; 7.2 also allows PEXPIRETIME, for the fast path of the guard, and CLIENT SETINFO, so that "
        "ACL LOG stays empty (default: 6.2)",
    )  # fmt: skip
    parser.set_defaults(command=show)


def show(options: argparse.Namespace) -> int:
    """Print the access list; raise InvalidArgument for names and patterns that no rule can contain."""
    user = options.user or user_name(options.roles, options.namespace)
    words = rule(
        options.roles, options.namespace, user, keys=options.keys, channels=options.channels,
        cluster=options.cluster, durable=options.durable, since_7_2=options.redis == "7.2",
    )  # fmt: skip
    print(" ".join(words))
    if sys.stdout.isatty():
        print(f"A new user has no password yet: ACL SETUSER {user} >password", file=sys.stderr)
    return 0
