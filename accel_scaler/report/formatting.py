"""Numbers in words, the same in the summary and the page."""

from __future__ import annotations


def times(count: int) -> str:
    """``once``, ``twice``, ``14 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def shorten(name: str, limit: int) -> str:
    """At most ``limit`` characters; the end of a layer's name tells more than its beginning."""
    if len(name) <= limit:
        return name
    head = max(1, limit // 3)
    return f"{name[:head]}…{name[head + 1 - limit :]}"


def layer_name(name: str, limit: int) -> str:
    """A parameter's name in at most ``limit`` characters, which keeps the number of its layer.

    ``transformer.h.11.attn.c_proj.weight`` becomes ``h.11.attn.c_proj``.
    """
    if len(name) <= limit:
        return name
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) > 1:
        del parts[-1]
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return shorten(".".join(parts), limit)
    head, tail = parts[max(0, at - 1) : at + 1], parts[at + 1 :]
    # What is next to the layer tells where, the last part what: those between go first.
    for kept in range(len(tail) - 1, -1, -1):
        link = "." if kept == len(tail) - 1 else "…"
        text = ".".join([*head, *tail[:kept]]) + link + tail[-1]
        if len(text) <= limit:
            return text
    return shorten(".".join([*head, *tail[-1:]]), limit)
