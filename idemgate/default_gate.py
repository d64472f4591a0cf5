"""The gate of `idemgate.once` and `idemgate.merge`."""

from __future__ import annotations

import os

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import check_name
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate, parse_source
from idemgate.presence.presence import make_observer
from idemgate.store.context import Redact
from idemgate.store.durability import DurabilityOption, parse_durability

__all__ = ["configure", "default_gate"]

default_gate: Gate = Gate(namespace=os.environ.get("IDEMGATE_NAMESPACE", "default"))
"""The gate of `idemgate.once` and `idemgate.merge`. Its first use reads IDEMGATE_URL, unless `configure` was called."""


def configure(
    store: object,
    *,
    namespace: str | None = None,
    timeout: Duration | None = None,
    durability: DurabilityOption = None,
    presence: bool = True,
    redact: Redact | None = None,
) -> Gate:
    """Set the store of the default gate, `idemgate.once` and `idemgate.merge`. Opens no connection.

    Call it once, when the program starts. Functions may be decorated before. While a test overrides the default gate
    (`idemgate.testing.override`), it only checks the arguments.

    Args:
        store: a URL or a redis-py client; see `Gate`.
        namespace: the first part of every key. None: the environment variable IDEMGATE_NAMESPACE, or "default".
        timeout: see `Gate`. None: the present one, 5 s.
        durability: see `Gate`.
        presence, redact: see `Gate`.

    Returns:
        The default gate.

    Raises:
        InvalidArgument: an argument is invalid, or the default gate was used before.
        NotConfigured: the client cannot be copied.
    """
    context = default_gate.context
    if context.is_used and not context.overridden:
        fix = "Call configure() before the first guarded call, or make a Gate of your own"
        raise InvalidArgument("store", default_gate, "the default gate is in use already", fix)
    source = parse_source(store)
    if source is None:
        raise InvalidArgument("store", store, "neither a URL nor a client", "Pass 'redis://localhost:6379/0'")
    name = context.namespace if namespace is None else check_name(namespace, "namespace")
    seconds = context.timeout if timeout is None else milliseconds(timeout, "timeout") / 1000
    parsed = parse_durability(durability, name)
    if context.overridden:  # by a test, which would else reach the store of the program
        return default_gate
    observer = make_observer(context, presence, redact)
    url = store if isinstance(store, str) else None
    options = {"namespace": name, "timeout": seconds, "durability": durability, "presence": presence, "redact": redact}
    default_gate._options().update(options, store=url)
    context.observer, context.redact = observer, redact
    context.source, context.namespace, context.timeout, context.durability = source, name, seconds, parsed
    return default_gate
