"""Small execution plans of MSCCL++, written in a few words: the files of these tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_PLACE = re.compile(r"([iosIOS])(?:(\d+)\.)?(\d+)(?:x(\d+))?")


class _Block:
    """The channels and remote buffers of a thread block, and of its GPU, as its operations name them."""

    def __init__(self, gpu: int, n_gpus: int) -> None:
        self.gpu = gpu
        self.peers = [peer for peer in range(n_gpus) if peer != gpu]

    def channel(self, word: str) -> int:
        """`1` is the first channel to GPU 1, `1'` the second."""
        return 2 * self.peers.index(int(word.rstrip("'"))) + word.endswith("'")

    def operand(self, word: str) -> dict[str, Any]:
        """`i0` is this GPU's, `I1.0x2` two chunks of GPU 1's input."""
        match = _PLACE.fullmatch(word)
        assert match is not None, word
        place: dict[str, Any] = {"index": int(match[3]), "size": int(match[4] or 1)}
        if match[2] is None:
            return {"type": match[1], **place}
        return {"buffer_id": 3 * self.peers.index(int(match[2])) + "IOS".index(match[1]), **place}

    def op(self, text: str) -> dict[str, Any]:
        """`put i0 > S1.0`, `wait 1 2'`, `sem_acquire 0`, `nop`; `put*` and so on go over port channels; a pipeline is
        from `loop 32 1` (its unit and chunks) to `end`."""
        name, *words = text.split()
        if name.endswith("*"):
            return self.port_op(name[:-1], words)
        if name in ("signal", "wait", "rlxsignal", "rlxwait"):
            return {"name": name, "channel_ids": [self.channel(word) for word in words], "channel_type": "memory"}
        if name.startswith("sem"):
            return {"name": name, "semaphore_ids": [int(word) for word in words]}
        if name == "barrier":
            return {"name": name, "barrier_id": int(words[0]), "num_threadblocks": int(words[1])}
        if name == "loop":
            return {"name": "pipeline", "iter_context": {"unit_size": int(words[0]), "num_chunks": int(words[1])}}
        if name in ("nop", "end"):
            return {"name": name}
        at = words.index(">")
        sides = {"src_buff": words[:at], "dst_buff": words[at + 1 :]}
        return {"name": name, "channel_type": "memory"} | {
            side: [self.operand(word) for word in each] for side, each in sides.items()
        }

    def port_op(self, name: str, words: list[str]) -> dict[str, Any]:
        """`put* i0 > S1.0`, `signal* 1`; `flush* 1` as the language writes it, `flush* 1 > S1.0` with a destination."""
        at = words.index(">") if ">" in words else len(words)
        sides = {"dst_buff": words[at + 1 :]}
        if name in ("signal", "wait", "rlxsignal", "rlxwait", "flush"):
            ids = [self.peers.index(int(word)) for word in words[:at]]
        else:
            ids = [self.peers.index(int(word[1 : word.index(".")])) for word in sides["dst_buff"]]
            sides["src_buff"] = words[:at]
        places = {side: [self.operand(word) for word in each] for side, each in sides.items() if each}
        return {"name": name, "channel_ids": ids, "channel_type": "port", **places}


def _folded(ops: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operations, each pipeline with its own."""
    found: list[dict[str, Any]] = []
    into = found
    for op in ops:
        if op["name"] == "end":
            into = found
        else:
            into.append(op)
            into = op.setdefault("ops", []) if op["name"] == "pipeline" else into
    return found


def plan(
    gpus: Sequence[Sequence[str]],
    *,
    coll: str = "allreduce",
    chunks: int | tuple[int, int] = 1,
    proto: str = "Simple",
    in_place: bool = True,
    scratch: int = 4,
    semaphores: Sequence[int] = (),
    without: tuple[int, int] | None = None,
    **fields: object,
) -> bytes:
    """A plan, an operation a line; GPU `without[0]` has no channels to `without[1]`."""
    inputs, outputs = (chunks, chunks) if isinstance(chunks, int) else chunks
    made = []
    for number, blocks in enumerate(gpus):
        maker = _Block(number, len(gpus))
        threadblocks = []
        for at, text in enumerate(blocks):
            threadblocks.append(
                {
                    "id": at,
                    "ops": _folded([maker.op(each.strip()) for each in text.split(";") if each.strip()]),
                    "channels": [{"channel_type": "memory", "channel_ids": list(range(2 * len(maker.peers)))}],
                    "remote_buffer_refs": [
                        {"access_channel_type": "memory", "remote_buffer_ids": list(range(3 * len(maker.peers)))}
                    ],
                }
            )
        peers = [peer for peer in maker.peers if (number, peer) != without]
        if without is not None and number == without[0]:
            for each in threadblocks:
                each["channels"] = []
        made.append(
            {
                "id": number,
                "input_chunks": inputs,
                "output_chunks": outputs,
                "scratch_chunks": scratch,
                "threadblocks": threadblocks,
                "channels": [{"channel_type": "memory", "connected_to": [peer for peer in peers for _ in "12"]}],
                "remote_buffers": [
                    {"rank": peer, "type": kind, "access_channel_types": ["memory"]}
                    for peer in maker.peers
                    for kind in "ios"
                ],
                "semaphores": [{"init_value": value} for value in semaphores],
            }
        )
    if any("*" in text for blocks in gpus for text in blocks):
        for gpu in made:
            _add_ports(gpu)
    head = {"name": "sample", "collective": coll, "protocol": proto, "inplace": in_place, **fields}
    return json.dumps({**head, "gpus": made}, indent=1).encode()


def _add_ports(gpu: dict[str, Any]) -> None:
    """A port channel to each other GPU, through which all its buffers are reached."""
    peers = list(dict.fromkeys(gpu["channels"][0]["connected_to"]))
    gpu["channels"].append({"channel_type": "port", "connected_to": peers})
    for buffer in gpu["remote_buffers"]:
        buffer["access_channel_types"] = ["memory", "port"]
    for block in gpu["threadblocks"]:
        ids = block["remote_buffer_refs"][0]["remote_buffer_ids"]
        block["channels"].append({"channel_type": "port", "channel_ids": list(range(len(peers)))})
        block["remote_buffer_refs"].append({"access_channel_type": "port", "remote_buffer_ids": ids})


START = "rlxsignal {0}; rlxwait {0}; nop; "
MEET = "nop; signal {0}'; wait {0}'; nop; "


def both(text: str, second: str | None = None, **options: Any) -> bytes:
    """Two GPUs that do the same, or `second` at GPU 1; `|` separates blocks, `P` is the other GPU."""
    texts = [text, text if second is None else second]
    gpus = []
    for number, each in enumerate(texts):
        each = each.replace("START", START.format(1 - number)).replace("MEET", MEET.format(1 - number))
        gpus.append(each.replace("P", str(1 - number)).split("|"))
    return plan(gpus, **options)
