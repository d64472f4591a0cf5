"""Reads the scripts as text, and says where a header and the code below it disagree.

Everything works on a mapping of file name -> text ("guard/claim", "lib/now"), so that a test can plant a fault in a
copy. The reading is by pattern, not by a grammar: it knows the few ways in which our scripts are written, and
complains about any other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, takewhile

__all__ = ["Header", "expanded", "header_of", "violations"]

Sources = Mapping[str, str]


def _set(words: str) -> set[str]:
    return set(words.split())


READS = _set("""EXISTS HEXISTS HGET HGETALL HKEYS HLEN HMGET HSTRLEN HVALS PTTL STRLEN TIME TTL TYPE ZCARD
    ZCOUNT ZLEXCOUNT ZMSCORE ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZRANK ZREVRANGE ZREVRANGEBYSCORE ZREVRANK ZSCORE
    LLEN LRANGE XPENDING HSCAN ZSCAN GET SCARD SISMEMBER SMEMBERS PEXPIRETIME""")
WRITES = _set("""DEL HDEL HINCRBY HSET HSETNX PERSIST PEXPIRE PEXPIREAT PUBLISH UNLINK ZADD ZINCRBY ZPOPMAX
    ZPOPMIN ZREM ZREMRANGEBYRANK ZREMRANGEBYSCORE LPUSH RPUSH LPOP RPOP LTRIM SADD SREM XADD SET INCRBY
    XCLAIM XGROUP""")
"""What Redis 6.2 knows too, and a script of ours may use; but it has no record that needs PEXPIRETIME."""
GLOBALS = _set("""KEYS ARGV redis cmsgpack struct math string table tonumber tostring type ipairs pairs unpack select
    error next assert pcall""")
KEYWORDS = _set("""and break do else elseif end false for function if in local nil not or repeat return then true until
    while""")
ANSWERS = "--- Makes a part of the reply."
"""The line of a library that returns a part of the reply of those that include it."""
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}


@dataclass(frozen=True)
class Header:
    """What the head of a script says of it. `tail` is where its repeated arguments begin, and how many are one;
    `required` of the `keys` are in every call; `many`: any number of keys of one kind; `spare`: how many of the last
    `args` a call may leave out; `packed`: what replies begin with that are one string."""

    about: str
    keys: int
    required: int
    many: bool
    args: frozenset[int]
    spare: int
    tail: tuple[int, int] | None
    words: frozenset[str]
    each: frozenset[str]
    packed: frozenset[str]

    def takes(self, args: int) -> bool:
        """Whether a call may have that many arguments."""
        fixed = len(self.args)
        return (
            fixed - self.spare <= args <= fixed
            if self.tail is None
            else args >= fixed and (args - fixed) % self.tail[1] == 0
        )


# -- reading ----------------------------------------------------------------------------------------------------------


@cache
def header_of(text: str) -> Header:
    """The header of a script."""
    lines = [line[4:].strip() for line in text.splitlines() if line.startswith("---") and "@include" not in line]
    about = " ".join(takewhile(lambda line: not line.startswith(("KEYS[", "ARGV[", "Returns")), lines))
    given = _found(r"^KEYS\[(\d+)(?:\.\.(\d+))?\] (\w.*)", lines)
    ends = {int(last or first): " only if " in meaning for first, last, meaning in given}
    args = frozenset(int(number) for (number,) in _found(r"^ARGV\[(\d+)\] \S", lines))
    returns = " ".join(lines).partition("Returns ")[2]
    return Header(
        about=about,
        keys=max(ends, default=0),
        required=max((end for end, optional in ends.items() if not optional), default=0),
        many=any(line.startswith("KEYS[1..] ") for line in lines),
        args=args,
        spare=len(list(_found(r"^ARGV\[(\d+)\] \S.* only if ", lines))),
        tail=_tail(lines),
        words=frozenset(re.findall(r'\{"(\w+)"', returns)),
        each=frozenset(
            word for part in re.findall(r", then ([^{}]*)", returns) for word in re.findall(r'"(\w+)"', part)
        ),
        packed=frozenset(re.findall(r'packed "(\w)"', returns)),
    )


def _found(pattern: str, lines: list[str]) -> Iterator[tuple[str, ...]]:
    return (match.groups() for line in lines if (match := re.match(pattern, line)))


def _tail(lines: list[str]) -> tuple[int, int] | None:
    arguments = " ".join(lines).partition(" Returns ")[0]
    for start, meaning in re.findall(r"ARGV\[(\d+)\.\.\] (.+)$", arguments):
        several = re.match(r"(\w+) an? \w+: (.+)$", meaning)
        if not several:
            return int(start), 1
        return int(start), COUNTS[several[1]] if COUNTS[several[1]] == len(several[2].split(";")) else 0
    return None


_LITERAL_OR_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|--[^\n]*')


@cache
def _code(text: str) -> str:
    """Without comments, which includes are too."""
    return _LITERAL_OR_COMMENT.sub(lambda match: match[1] or "", text)


@cache
def _bare(text: str) -> str:
    """Without what stands in strings."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', _code(text))


def _includes(text: str) -> list[str]:
    return [name for _, name in _include_lines(text)]


@cache
def _include_lines(text: str) -> list[tuple[str, str]]:
    """The indent of each include and the file; what is indented belongs to the function around it."""
    return re.findall(r'^( *)--- @include "([^"]+)"$', text, re.MULTILINE)


@cache
def _include_blocks(text: str) -> list[str]:
    """Return the includes that stand together, with the same kind of indent."""
    return re.findall(r"(?:^--- @include .*\n)+|(?:^ +--- @include .*\n)+", text, re.MULTILINE)


def expanded(name: str, sources: Sources, seen: set[str] | None = None) -> list[str]:
    """The files of a script in the order in which the reader puts them, itself last."""
    seen = {name} if seen is None else seen
    found: list[str] = []
    for block in _include_blocks(sources[name]):
        scope = seen.copy() if block.startswith(" ") else seen
        for wanted in _includes(block):
            if wanted not in scope and wanted in sources:
                scope.add(wanted)
                found += expanded(wanted, sources, scope)
    return [*found, name]


@cache
def _defined(text: str) -> list[str]:
    """Names that a file declares at its top level."""
    functions = re.findall(r"^local function (\w+)", text, re.MULTILINE)
    values = re.findall(r"^local (?!function)([\w, ]+?)(?: =|$)", text, re.MULTILINE)
    return [*functions, *chain.from_iterable(re.split(r", *", names) for names in values)]


@cache
def _declared(bare: str) -> set[str]:
    """Every local name, wherever it is declared."""
    lists = re.findall(r"\blocal (?!function)([\w, ]+)", bare) + re.findall(r"\bfor ([\w, ]+?) (?:=|in)\b", bare)
    lists += re.findall(r"\bfor (\w+) =", bare) + re.findall(r"\bfunction \w*\(([^)]*)\)", bare)
    return {name.strip() for names in lists for name in names.split(",")} | set(re.findall(r"\bfunction (\w+)", bare))


@cache
def _used(bare: str) -> set[str]:
    """Names that are read or called: not fields, not the keys of a table constructor."""
    depth, found = 0, set[str]()
    for match in re.finditer(r"[{}]|(?<![\w.])([A-Za-z_]\w*)(\s*=(?!=))?", bare):
        if match[1] is None:
            depth += 1 if match[0] == "{" else -1
        elif match[1] not in KEYWORDS and not (depth and match[2]):
            found.add(match[1])
    return found


# -- judging ----------------------------------------------------------------------------------------------------------


def violations(sources: Sources) -> list[str]:
    """All there is to complain about, each line beginning with the file."""
    found: list[str] = []
    for name, text in sources.items():
        checks = [_includes_agree, _calls_known_commands, _calls_with_keys]
        checks += (
            [_is_a_library]
            if _is_library(name)
            else [_keys_agree, _args_agree, _words_agree, _time_agrees, _stays_inside]
        )
        found += [f"{name}: {what}" for check in checks for what in check(name, text, sources)]
    return found


def _is_library(name: str) -> bool:
    return "lib" in name.split("/")


def _includes_agree(name: str, text: str, sources: Sources) -> Iterator[str]:
    wanted = list(dict.fromkeys(_includes(text)))
    once = [one for indent, one in _include_lines(text) if not indent]
    own = _used(_bare(text))
    yield from (f"includes {one}, which does not exist" for one in wanted if one not in sources)
    yield from (f"includes {one} twice" for one, times in Counter(once).items() if times > 1)
    for one in wanted:
        if one in sources and not own & set(_defined(_code(sources[one]))):
            yield f"includes {one} and does not use it"
        if name in _reached(one, sources):
            yield f"is in a cycle with {one}"
    reached = set(chain.from_iterable(_reached(one, sources) for one in wanted))
    for other in sources:
        missing = own & set(_defined(_code(sources[other]))) - _declared(_bare(text))
        if _is_library(other) and other != name and other not in reached and missing:
            yield f"uses {', '.join(sorted(missing))} and does not include {other}"


def _reached(name: str, sources: Sources) -> set[str]:
    """Return a file and all that it includes, directly or not."""
    found, wanted = set[str](), [name]
    while wanted:
        one = wanted.pop()
        if one in sources and one not in found:
            found.add(one)
            wanted += _includes(sources[one])
    return found


def _is_a_library(name: str, text: str, _: Sources) -> Iterator[str]:
    if not _defined(_code(text)):
        yield "defines nothing"
    if re.search(r"\b(KEYS|ARGV)\b", _code(text)):
        yield "reads KEYS or ARGV"


def _keys_agree(name: str, text: str, sources: Sources) -> Iterator[str]:
    code = re.sub(r"#KEYS\b", "", _code(text))
    used = {int(number) for number in re.findall(r"\bKEYS\[(\d+)\]", code)}
    each = re.findall(r"\bKEYS\[[a-z]\w*\]|\bipairs\(KEYS\)", code)
    if each:
        used.discard(2)  # whether there are several
    for whole in set(re.findall(r"\b(\w+)\(KEYS\)", code)) - GLOBALS:
        used |= _keys_of(whole, sources)
    if re.search(r"\bKEYS\b(?!\[(?:\d+|[a-z]\w*)\])", re.sub(r"\b(?!unpack)\w+\(KEYS\)", "", code)):
        yield "uses KEYS in a way that cannot be checked"
    if bool(each) != header_of(text).many:
        yield "takes all of KEYS, or says so, and not both"
    declared = set(range(1, header_of(text).keys + 1))
    if used != declared:
        yield f"uses KEYS {sorted(used)}, its header says {sorted(declared)}"


def _keys_of(function: str, sources: Sources) -> set[int]:
    """Return the numbers of the keys that this function of a library names."""
    texts = (_code(text) for text in sources.values() if function in _defined(_code(text)))
    return {int(number) for text in texts for number in re.findall(r"\bkeys\[(\d+)\]", text)}


def _args_agree(name: str, text: str, _: Sources) -> Iterator[str]:
    code, header = _code(text), header_of(text)
    used = {int(number) for number in re.findall(r"\bARGV\[(\d+)\]", code)}
    if used != header.args or header.args != frozenset(range(1, len(header.args) + 1)):
        yield f"uses ARGV {sorted(used)}, its header says {sorted(header.args)}"
    wanted, found = set() if header.tail is None else {header.tail}, _tails_read(code)
    rest = re.search(r"\bARGV(?!\[\d+\])", re.sub(r"#ARGV\b", "", code))
    if found - wanted:
        yield f"reads ARGV from {sorted(found)} (start, how many are one), its header says {sorted(wanted)}"
    elif bool(rest) != bool(wanted):
        yield f"reads {'' if rest else 'no '}ARGV behind those with a number, its header says {sorted(wanted)}"
    elif header.tail and header.tail[0] != len(header.args) + 1:
        yield f"has arguments from {header.tail[0]} on, but {len(header.args)} before them"


def _tails_read(code: str) -> set[tuple[int, int]]:
    """Return the start and the step of what reads the rest of ARGV, where the code shows both."""
    found = {(int(start), 1) for start in re.findall(r"\bunpack\(ARGV, (\d+)\)", code)}
    columns = re.findall(r"\bunpack\(ARGV, (\d+)(?:, \d+)? \+ \w+\)", code)
    found |= {(int(start), columns.count(start)) for start in columns}
    read: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    loop = re.compile(r"^( *)for (\w+) = (\d+), [^,\n]+?(?:, (\d+))? do\n(.*?)^\1end", re.MULTILINE | re.DOTALL)
    for _, variable, start, step, body in loop.findall(code):
        offsets = {int(offset or 0) for offset in re.findall(rf"\bARGV\[{variable}(?: \+ (\d+))?\]", body)}
        if offsets:
            read[int(start), int(step or 1)] |= offsets
    for (first, several), offsets in read.items():
        found.add((first, several if offsets == set(range(several)) else -len(offsets)))
    return found


def _words_agree(name: str, text: str, sources: Sources) -> Iterator[str]:
    reached = set(chain.from_iterable(_reached(one, sources) for one in _includes(text)))
    header, answering = header_of(text), sorted(one for one in reached if ANSWERS in sources.get(one, ""))
    code = "\n".join(map(_code, [text, *(sources[one] for one in answering)]))
    replies = re.findall(r"\{\s+([^{},]+), now_ms\b", code)
    words = {word for reply in replies for word in re.findall(r'"(\w+)"', reply)}
    if words != header.words:
        yield f"answers {sorted(words)}, its header says {sorted(header.words)}"
    written = re.findall(r'(?:return|receipt =|answer =|reply\[[^\n\]]+\] =) ([^\n{]*"\w+"[^\n]*)', code)
    each = {word for one in written for word in re.findall(r'(?<!== )"(\w+)"', one) if "redis." not in one}
    if not header.packed <= each:
        yield f"answers packed {sorted(each)}, its header says {sorted(header.packed)}"
    if each - header.packed != header.each:
        yield f"answers {sorted(each)} for each, its header says {sorted(header.each)}"


def _time_agrees(name: str, text: str, sources: Sources) -> Iterator[str]:
    if header_of(text).about[-1:] not in (".", ")"):
        yield "begins with no sentence"
    if not re.search(r'^--- ARGV\[1\] now, us, or "" for the server\'s$', text, re.MULTILINE):
        yield "has another first argument than the time"
    if len(re.findall(r"(?<!\w)now\(", _code(text))) != 1:
        yield "does not ask for the time once"
    files = expanded(name, sources)
    if sum(_code(sources[one]).count('"TIME"') for one in files) != 1:
        yield "calls TIME more or less than once"


def _stays_inside(name: str, text: str, sources: Sources) -> Iterator[str]:
    files = list(dict.fromkeys(expanded(name, sources)))
    whole = "\n".join(_code(sources[one]) for one in files)
    if re.search(r'"(?:P?EXPIRE|PEXPIREAT)"[^\n]*"(?:NX|XX|GT|LT)"', whole):
        yield "uses an option of EXPIRE that Redis 6.2 does not know"
    if 'redis.call("PUBLISH"' in whole:
        yield "fails where a hint may not be published, after it wrote; use pcall"
    if re.search(r"\.\.\s*\w+_us\b|\b\w+_us\s*\.\.", whole):
        yield "joins a large number to a text: Lua writes 1.787e+15; use digits()"
    if "Writes nothing" in text:
        run = _code_run(name, files, sources)
        yield from (f"says that it writes nothing, and calls {one}" for one in sorted(WRITES) if f'"{one}"' in run)
    names = [one for file in files for one in _defined(_code(sources[file]))]
    yield from (f"{one} is defined twice in the whole" for one, times in Counter(names).items() if times > 1)
    bare = "\n".join(_bare(sources[one]) for one in files)
    yield from (f"{one} is not defined" for one in sorted(_used(bare) - GLOBALS - _declared(bare)))


CALL = re.compile(r"redis\.p?call\(\s*([^,)]+)(?:,\s*([^,]+?))?\s*[,)]")


def _calls_known_commands(name: str, text: str, _: Sources) -> Iterator[str]:
    for command, _key in CALL.findall(_code(text)):
        if command.strip('"') not in READS | WRITES:
            yield f"calls {command}"


def _calls_with_keys(name: str, text: str, _: Sources) -> Iterator[str]:
    known = _key_names(text)
    for command, key in dict.fromkeys(CALL.findall(_code(text))):
        named = re.match(r'(?:\w+ and K\.\w+ or )?(?:call\.)?K\.\w+|K\[\w+\]|KEYS\[\w+\]$|"[A-Z]+"$', key)
        if key and not named and key not in known:
            yield f"gives {command} the key {key}, which is not one of KEYS"


def _key_names(text: str) -> set[str]:
    """Return the variables that hold names of keys: those assigned from KEYS or K, and those the header names."""
    found = {name for names in re.findall(r"^--- Keys: (.+)$", text, re.MULTILINE) for name in names.split(", ")}
    for names, values in re.findall(r"\blocal ([\w, ]+) = ([^\n]+)", _code(text)):
        pairs = zip(names.split(", "), re.split(r", (?![^({]*[)}])", values), strict=False)
        found |= {name for name, value in pairs if re.fullmatch(r"(?:KEYS|K\b.*)(?:\[\w+\])", value.strip())}
    return found


def _code_run(name: str, files: list[str], sources: Sources) -> str:
    """Return the code of a script and of all functions of its libraries that it may call."""
    function = re.compile(r"^local function (\w+)(.*?)^end\b", re.MULTILINE | re.DOTALL)
    libraries = "\n".join(_code(sources[one]) for one in files if one != name)
    bodies, outside = dict(function.findall(libraries)), function.sub("", libraries)
    run, wanted = [_code(sources[name]), outside], _used(_bare(sources[name])) | _used(_bare(outside))
    while called := wanted & bodies.keys():
        texts = [bodies.pop(one) for one in called]
        run += texts
        wanted = set().union(*(_used(_bare(one)) for one in texts))
    return "\n".join(run)
