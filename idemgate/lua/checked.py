"""Scripts that check the rights of their user before the first write.

The server checks each command of a script when the script calls it, and does not roll back. So a user whose access list
lacks one command would be refused after a part of the writes. `checked_script` returns a variant that asks for all of
its commands first (`redis.acl_check_cmd`, since Redis 7.0). Asking costs as much as a small command, so only users with
a name get this variant: their connections replace the script of each request. The default user runs the script itself.

A line `-- @allow ZADD HDEL` stands before the first write of a path. There the variant of a script in `_BY_PATH` asks
for these commands only, or for all of them (`*`). Every other script asks for all of them at its beginning.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha1
from typing import Any

from idemgate.lua import Script, commands, name_of, script, source

__all__ = ["checked_script", "checks_rights", "with_check"]

_BY_PATH = frozenset(
    (
        "guard/claim", "guard/complete", "topics/open", "topics/settle", "topics/settle_and_take", "topics/take",
        "topics/trigger",
    )
)  # fmt: skip
"""The scripts of most calls, and one that viewers run, too. On each of their paths a command is asked for, or runs
before the first write, or is that write.
"""
_WRITES = {
    "HDEL", "HSET", "HSETNX", "LPOP", "LPUSH", "LTRIM", "PERSIST", "PEXPIRE", "RPOP", "RPUSH", "SET", "UNLINK",
    "XADD", "ZADD", "ZREM", "ZREMRANGEBYRANK", "ZREMRANGEBYSCORE",
}  # fmt: skip
_UNASKED = {"TIME", "PUBLISH", "PEXPIRETIME"}
"""The time is read first, and a refused PUBLISH ends no script. PEXPIRETIME reads a record that only newer servers
hold, so users of older ones lack it. It runs before the first write of its key.
"""
_WORDS = {
    "HDEL": 1, "HEXISTS": 1, "HGET": 1, "HMGET": 1, "HSCAN": 1, "HSET": 2, "HSETNX": 2, "HSTRLEN": 1, "LPUSH": 1,
    "LRANGE": 2, "LTRIM": 2, "PEXPIRE": 1, "RPUSH": 1, "SET": 1, "XADD": 3, "ZADD": 2, "ZCOUNT": 2, "ZMSCORE": 1,
    "ZRANGE": 2, "ZRANGEBYLEX": 2, "ZRANGEBYSCORE": 2, "ZREM": 1, "ZREMRANGEBYRANK": 2, "ZREMRANGEBYSCORE": 2,
    "ZREVRANGE": 2, "ZSCAN": 1, "ZSCORE": 1,
}  # fmt: skip
"""How many words follow the key: Redis 8 checks no command without the right number of them. Not listed: none."""
_ALLOW = re.compile(r"^( *)-- @allow (.+)\n", re.MULTILINE)
_PRELUDE = """\
local function allow(command, ...)
  if not redis.acl_check_cmd(command, KEYS[1], ...) then
    -- The server refuses this, too: its error names the command, and ACL LOG has it. No script uses that key.
    redis.call(command, KEYS[1] .. ":refused", ...)
  end
end
if not redis.acl_check_cmd then -- before Redis 7.0
  allow = function() end
end
"""


def _calls(name: str, words: str) -> str:
    """Return the code that asks for these commands: names, or "*" for all of the script."""
    wanted = commands(name) - _UNASKED if words == "*" else words.split()
    return " ".join('allow("' + command + '"' + ', "1"' * _WORDS.get(command, 0) + ")" for command in sorted(wanted))


@cache
def checked_script(name: str) -> Script:
    """Return the variant of a script that checks its user's rights. It is the script itself if that writes nothing."""
    plain = script(name)
    text = plain.text.decode()
    if not commands(name) & _WRITES or "Writes nothing." in source(name):
        return plain
    if name in _BY_PATH:
        if not _ALLOW.search(text):
            return plain
        body = _ALLOW.sub(lambda found: f"{found[1]}{_calls(name, found[2])}\n", text)
    else:
        body = f"{_calls(name, '*')}\n{text}"
    return Script(name, _PRELUDE + body)


_EVALSHA, _EVAL = b"$7\r\nEVALSHA\r\n$40\r\n", b"$4\r\nEVAL\r\n$"


def checks_rights(settings: dict[str, Any]) -> bool:
    """Return whether the scripts of a connection check rights: it logs in with a name, or with unknown credentials.

    The user "default" usually may do everything.
    """
    return bool(settings.get("credential_provider")) or settings.get("username") not in (None, "", "default")


def with_check(request: bytes) -> bytes:
    """Return an encoded request with the variant of its script that checks rights. Return all others unchanged."""
    start = request.find(b"\n") + 1
    if request.startswith(_EVALSHA, start):
        start += len(_EVALSHA)
        name = name_of(request[start : start + 40])
        return request if name is None else b"".join((request[:start], checked_script(name).sha, request[start + 40 :]))
    if request.startswith(_EVAL, start):
        length, _, rest = request[start + len(_EVAL) :].partition(b"\r\n")
        name = name_of(sha1(rest[: int(length)], usedforsecurity=False).hexdigest().encode())
        if name is not None:
            text = checked_script(name).text
            return b"%b%b%d\r\n%b%b" % (request[:start], _EVAL, len(text), text, rest[int(length) :])
    return request
