"""Small algorithms in MSCCL's XML, written in a few words: the files of these tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

Block = tuple[int, int, int, str]
"""Peer to send to, peer to receive from, channel, and steps: `rrc i0 i0 x2 @1.0 !; nop @2.3`."""
_WORD = re.compile(r"([a-z]+)|([ios]\d+)|x(\d+)|@(\d+)\.(\d+)|(!)")


def step(number: int, text: str) -> str:
    """A step: its type, where it reads and writes, `xCOUNT`, `@BLOCK.STEP` that it waits for, `!` if others wait."""
    kind, places, count, wait, marked = "", [], 1, ("-1", "-1"), 0
    for word in text.split():
        match = _WORD.fullmatch(word)
        assert match is not None, word
        if match[1]:
            kind = word
        elif match[2]:
            places.append((word[0], word[1:]))
        elif match[3]:
            count = int(match[3])
        elif match[4]:
            wait = (match[4], match[5])
        else:
            marked = 1
    if kind == "nop":
        count, places = 0, [("i", "-1")]
    (src, src_at), (dst, dst_at) = places[0], places[-1]
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{src}" srcoff="{src_at}" dstbuf="{dst}" dstoff="{dst_at}" '
        f'cnt="{count}" depid="{wait[0]}" deps="{wait[1]}" hasdep="{marked}"/>'
    )


def algo(
    gpus: Sequence[Sequence[Block]],
    *,
    coll: str = "allreduce",
    chunks: int = 1,
    proto: str = "Simple",
    in_place: int = 1,
    out_of_place: int | None = None,
    scratch: int = 4,
    head: str = 'minBytes="0" maxBytes="1048576"',
    declared: tuple[int, int] | None = None,
) -> bytes:
    """A file, an element a line; `declared` are i_chunks and o_chunks if these are not those of the collective."""
    out = 1 - in_place if out_of_place is None else out_of_place
    share = chunks // len(gpus)
    inputs, outputs = declared or {"allgather": (share, chunks), "reducescatter": (chunks, share)}.get(
        coll, (chunks, chunks)
    )
    channels = max([block[2] for blocks in gpus for block in blocks], default=0) + 1
    lines = [
        f'<algo name="sample" proto="{proto}" nchannels="{channels}" nchunksperloop="{chunks}" ngpus="{len(gpus)}" '
        f'coll="{coll}" inplace="{in_place}" outofplace="{out}" {head}>'
    ]
    for gpu, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{gpu}" i_chunks="{inputs}" o_chunks="{outputs}" s_chunks="{scratch}">')
        for number, (send, recv, channel, text) in enumerate(blocks):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">')
            lines += [step(at, each) for at, each in enumerate(text.split(";")) if each.strip()]
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join((*lines, "</algo>", "")).encode()


def ring(p: int, kinds: Sequence[str] | None = None, **options: object) -> bytes:
    """A ring AllReduce of p chunks; `kinds` are the types of its steps if they are not the right ones."""
    right = ["s", *["rrcs"] * (p - 1), *["rcs"] * (p - 2), "r"]
    steps = kinds or right
    gpus = []
    for rank in range(p):
        words = [f"{kind} i{(rank - at) % p} i{(rank - at) % p}" for at, kind in enumerate(steps)]
        gpus.append([((rank + 1) % p, (rank - 1) % p, 0, "; ".join(words))])
    return algo(gpus, chunks=p, **options)  # type: ignore[arg-type]
