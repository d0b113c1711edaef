"""Small execution plans of MSCCL++ 0.7, written in a few words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_LOCAL = re.compile(r"([ios])(\d+)")
_REMOTE = re.compile(r"([IOS])(\d+)('?)\.(\d+)")
Pair = tuple[str, str, str]
"""Local buffer, remote buffer and type of a channel."""


class _Gpu:
    """A GPU with two channels (the second is `'`) to each other one, between each two buffers that its plan needs."""

    def __init__(self, gpu: int, n_gpus: int, memory: str, port: str) -> None:
        self.peers = [peer for peer in range(n_gpus) if peer != gpu]
        self.kinds = (memory, port)
        self.pairs: set[Pair] = set()

    def end(self, word: str, local: str, kind: str) -> tuple[dict[str, str], dict[str, int]]:
        """The buffers and the channel of `S1.0`, or of `s1` and `s1'` for what has no place."""
        match = _REMOTE.fullmatch(word) or _REMOTE.fullmatch(word[0].upper() + word[1:] + ".0")
        assert match is not None, word
        pair = (local, match[1].lower(), kind)
        self.pairs.add(pair)
        number = 2 * self.peers.index(int(match[2])) + bool(match[3])
        return {"src": pair[0], "dst": pair[1]}, {"id": number, "off": int(match[4])}

    def op(self, text: str) -> dict[str, Any]:
        """`put i0 > S1.0`, `signal is1 is2'`, `rrcs i0 I1.0 > i0 I1.0`; `put*` and so on go over port channels."""
        name, *words = text.split()
        kind, name = self.kinds[name.endswith("*")], name.rstrip("*")
        if name == "nop":
            return {"name": name, "deps": [{"tb": 0, "step": 0}]}
        if name == "barrier":
            return {"name": name, "barrier_id": int(words[0]), "nthread_blocks": int(words[1])}
        made: dict[str, Any] = {"name": name, "ctype": kind, "cnt": 1}
        if name in ("signal", "wait", "flush"):
            found = [self.end(word[1:], word[0], kind) for word in words]
            side = "i" if name == "wait" else "o"
            return made | {f"{side}_buff": found[0][0], f"{side}_cids": [each for _, each in found]}
        at = words.index(">")
        if name == "glres":
            places = [_LOCAL.fullmatch(word) for word in (words[0], words[at + 1])]
            self.pairs.add((words[0][0], words[0][0], "nvls"))
            sides = [(f"{key}buff", f"{key}off", each) for key, each in zip(("src", "dst"), places, strict=True)]
            made |= {"ctype": "nvls", "i_cids": [{"id": 0}], "o_cids": [{"id": 0}]}
            return made | {k: v for a, b, m in sides if m is not None for k, v in ((a, m[1]), (b, int(m[2])))}
        return made | self.side(name, kind, words[:at], "i", words) | self.side(name, kind, words[at + 1 :], "o", words)

    def side(self, name: str, kind: str, words: list[str], side: str, every: list[str]) -> dict[str, Any]:
        """The keys of the sources (`i`) or of the destinations (`o`)."""
        key = "src" if side == "i" else "dst"
        made: dict[str, Any] = {}
        local = next(word for word in every if _LOCAL.fullmatch(word))[0]
        for word in words:
            match = _LOCAL.fullmatch(word)
            if match is None:
                pair, end = self.end(word, local, kind)
                made[f"{side}_buff"] = pair
                made.setdefault(f"{side}_cids", []).append(end)
            elif f"{key}buff" not in made and name not in ("put", "pws", "pwsf", "ppkt", "rppkt", "get"):
                made |= {f"{key}buff": match[1], f"{key}off": int(match[2])}
            else:
                made.setdefault(f"{key}s", []).append({"buff": match[1], "off": int(match[2])})
        return made


def plan_07(
    gpus: Sequence[Sequence[str]],
    *,
    coll: str = "allreduce",
    chunks: int | tuple[int, int] = (1, 0),
    proto: str = "Simple",
    in_place: bool = True,
    scratch: int = 4,
    groups: int = 1,
    memory: str = "memory",
    port: str = "port",
    **fields: object,
) -> bytes:
    """A plan in the format of 0.7; chunks of the output in place are 0, as its language writes them."""
    inputs, outputs = (chunks, chunks) if isinstance(chunks, int) else chunks
    makers = [_Gpu(number, len(gpus), memory, port) for number in range(len(gpus))]
    ops = [
        [[maker.op(each.strip()) for each in text.split(";") if each.strip()] for text in blocks]
        for maker, blocks in zip(makers, gpus, strict=True)
    ]
    pairs = sorted(set().union(*(maker.pairs for maker in makers)))
    made = []
    for number, maker in enumerate(makers):
        twice = [peer for peer in maker.peers for _ in "12"]
        group = {"size": inputs, "ranks": list(range(len(gpus)))}
        channels: list[dict[str, Any]] = [
            {"buff": src, "type": kind, "rankGroups": [group]}
            if kind == "nvls"
            else {"srcbuff": src, "dstbuff": dst, "type": kind, "connectedTo": twice}
            for src, dst, kind in pairs
        ]
        refs = [
            {"src": src, "dst": dst, "ctype": kind, "cids": [0] if kind == "nvls" else list(range(len(twice)))}
            for src, dst, kind in pairs
        ]
        counts = {"inputChunks": inputs, "outputChunks": outputs, "scratchChunks": scratch, "chunkGroups": groups}
        blocks = [{"id": at, "ops": each, "channels": refs} for at, each in enumerate(ops[number])]
        made.append({"id": number, **counts, "threadblocks": blocks, "channels": channels})
    head = {"name": "sample", "collective": coll, "protocol": proto, "inplace": in_place, "gpus": made, **fields}
    return json.dumps(head, indent=1).encode()


START = "signal is{0}; wait is{0}; nop; "
MEET = "nop; signal is{0}'; wait is{0}'; nop; "


def both_07(text: str, second: str | None = None, **options: Any) -> bytes:
    """Two GPUs that do the same, or `second` at GPU 1; `|` separates blocks, `P` is the other GPU."""
    gpus = []
    for number, each in enumerate([text, text if second is None else second]):
        each = each.replace("START", START.format(1 - number)).replace("MEET", MEET.format(1 - number))
        gpus.append(each.replace("P", str(1 - number)).split("|"))
    return plan_07(gpus, **options)
