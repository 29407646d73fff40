"""Ways to damage a file: its bytes, its lines, its values. Each takes the chance it draws from: all are repeatable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import yaml

# What has a meaning somewhere: marks, ends of lines, brackets, escapes, numbers at the edge of what a type can hold.
PIECES = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b'"', b"'", b"[", b"]", b"{", b"}", b":", b",", b"&a ",
    b"*a", b"!!", b"|", b">", b"---\n", b"...\n", b"null", b"true", b"-1", b"0", b"1e400", b"NaN", b"Infinity",
    b"99999999999999999999", b"18446744073709551616", b"\\ud800", b"\\u0000", b"../", b"/", b"%00", b"${HOME}", b"\x85",
    "Ж".encode(), b"\xd0", b"{{", b"}}", b"__class__",
]  # fmt: skip

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "1e999", "30k", "1 epoch", "auto", "none", "never",
    "x" * 10_000, "../../outside", "/etc/passwd", "C:\\x", "\0", "\ud800", "a\nb", "Ж", [], {}, [[]], [None],
    {"": None}, {"a": {"a": {"a": 1}}}, [1, "a", None], ["x"] * 1000,
]  # fmt: skip

YAML_PIECES = [
    "!!python/object/apply:os.system ['touch executed']", "!!python/name:os.system", "!!binary aGVsbG8=",
    "!!set {a, b}", "!!omap [a: 1]", "!!timestamp 2026-99-99", "2026-02-30", "2026-01-01", "&a [*a]",
    "&a {b: *a}", "*nothing", "!unknown x", "? [a]\n: b", "? {a: b}\n: c", "0x" + "f" * 5000, "0o17", "1_000",
    "12:30:45", ".inf", ".nan", "~", "=", "<<: {seed: 1}", "<<: [1]", "'\\ud800'", '"\\ud800"', '"\\0"', "@", "`",
    "%TAG ! x", "[" * 2000, "{a: " * 2000, "- " * 2000, "|2\n  x", ">-\n", "9" * 5000,
]  # fmt: skip


def bomb(levels: int = 40) -> str:
    """A few lines of YAML that stand for 2**levels values."""
    lines = ["b0: &b0 [x, x]", *(f"b{at}: &b{at} [*b{at - 1}, *b{at - 1}]" for at in range(1, levels))]
    return "\n".join(lines) + "\n"


def change_bytes(data: bytes, chance: Random) -> bytes:
    """A few places flipped, cut out, doubled, put in or moved."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randint(0, len(data))
        end = min(len(data), at + chance.choice((1, 2, 8, 64, 1024)))
        match chance.choice(("flip", "flip", "flip", "cut", "insert", "insert", "double", "end", "noise", "lines")):
            case "flip" if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case "cut":
                data = data[:at] + data[end:]
            case "insert":
                data = data[:at] + chance.choice(PIECES) + data[at:]
            case "double":
                data = data[:end] + data[at:]
            case "end":
                data = data[:at]
            case "noise":
                data = data[:at] + chance.randbytes(end - at) + data[end:]
            case "lines":
                data = _change_lines(data, chance)
    return data


def _change_lines(data: bytes, chance: Random) -> bytes:
    lines = data.split(b"\n")
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.choice(("swap", "double", "drop", "indent")):
        case "swap":
            lines[one], lines[other] = lines[other], lines[one]
        case "double":
            lines.insert(other, lines[one])
        case "drop":
            del lines[one]
        case "indent":
            lines[one] = b" " * chance.randrange(1, 9) + lines[one]
    return b"\n".join(lines)


def change_values(tree: Any, chance: Random) -> Any:
    """A copy of plain values with some of them replaced, moved, renamed, doubled or dropped."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            return chance.choice(VALUES)
        holder, key = chance.choice(places)
        match chance.choice(("value", "value", "value", "near", "near", "drop", "rename", "swap", "nest", "copy")):
            case "value":
                holder[key] = copy.deepcopy(chance.choice(VALUES))
            case "near":
                holder[key] = _near(holder[key], chance)
            case "drop":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[chance.choice(("", "x", str(key) + "x", str(key)[:-1], "../x", "/x", "parts"))] = holder.pop(key)
            case "swap":
                other, place = chance.choice(places)
                holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
            case "nest":
                for _ in range(chance.choice((1, 3, 300))):
                    holder[key] = chance.choice(([holder[key]], {"a": holder[key]}))
            case "copy" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
    return tree


def _near(value: Any, chance: Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(
            (value + 1, value - 1, -value, value * 2, value * 10**6, value ^ 1 << chance.randrange(40))
        )
    if isinstance(value, float):
        return chance.choice((value * 1.5, -value, value * 1e9, 1e308))
    if isinstance(value, str):
        at = chance.randint(0, len(value))
        piece = chance.choice(PIECES).decode("utf-8", "replace")
        return chance.choice((value[:at] + piece + value[at:], value[:at], value * 2, value.upper(), f"../{value}"))
    if isinstance(value, list):
        return chance.choice((value[:-1], value * 2, value[::-1], value[:1]))
    return chance.choice(VALUES)


def _places(tree: Any, deep: int = 60) -> Iterator[tuple[Any, Any]]:
    """(what holds a value, its key or index) of all values."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        if deep:
            yield from _places(value, deep - 1)


def change_json(data: bytes, chance: Random) -> bytes:
    """JSON with other values; or with other bytes, so that it need not be JSON any more."""
    if chance.random() < 0.3:
        return change_bytes(data, chance)
    return to_json(change_values(json.loads(data), chance), chance)


def to_json(tree: Any, chance: Random) -> bytes:
    """As Python's own writer does it, NaN among it; half characters come out as escapes or as bytes."""
    try:
        text = json.dumps(tree, ensure_ascii=chance.random() < 0.7, indent=chance.choice((None, 1)))
    except RecursionError:
        text = "[" * 5000
    return text.encode("utf-8", "surrogatepass")


def change_yaml(data: bytes, chance: Random) -> bytes:
    """A run file with other values, other bytes, or what YAML can do beside plain values."""
    way = chance.random()
    if way < 0.3:
        return change_bytes(data, chance)
    if way < 0.75:
        tree = change_values(yaml.safe_load(data), chance)
        dump: Callable[..., Any] = yaml.safe_dump if chance.random() < 0.8 else json.dumps
        try:
            return str(dump(tree)).encode("utf-8", "replace")
        except RecursionError:
            return b"{a: " * 3000
    lines = data.decode().splitlines()
    at = chance.randrange(len(lines) + 1)
    if way < 0.77:
        lines.insert(0, bomb(chance.choice((5, 18, 40, 100))))
    elif way < 0.9 and at < len(lines) and ":" in lines[at]:
        lines[at] = f"{lines[at].split(':')[0]}: {chance.choice(YAML_PIECES)}"
    else:
        lines.insert(at, chance.choice(YAML_PIECES))
    return "\n".join(lines).encode()


def change_safetensors(data: bytes, chance: Random) -> bytes:
    """Its header's values, the length of its header, or any bytes of it."""
    if chance.random() < 0.4:
        return change_bytes(data, chance)
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    if chance.random() < 0.2:
        length = chance.choice((0, 1, size - 1, size + 1, len(data), 2**31, 2**63 - 1, 2**64 - 1))
        return length.to_bytes(8, "little") + header + rest
    changed = to_json(change_values(json.loads(header), chance), chance)
    return len(changed).to_bytes(8, "little") + changed + rest
