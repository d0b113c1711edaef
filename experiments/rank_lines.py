"""Lines of JSON to and from the ranks of a job, over a stream socket each."""

from __future__ import annotations

import json
import socket
import time
from typing import IO, Any

from optcc.errors import RuntimeFault


class Hung(RuntimeFault):
    """A rank that did not answer in time, or whose process exited."""


class Exited(Hung):
    """A rank whose process exited."""


class RankLines:
    """The sockets of the ranks of a job, in the order in which they were added."""

    def __init__(self) -> None:
        self._wires: list[tuple[socket.socket, IO[str]]] = []

    def __len__(self) -> int:
        return len(self._wires)

    def add(self, wire: socket.socket) -> None:
        """One more rank; `close` closes its socket."""
        wire.setblocking(True)
        self._wires.append((wire, wire.makefile("r", encoding="utf-8")))

    def tell(self, value: Any) -> None:
        """Sends a line to every rank."""
        for wire, _ in self._wires:
            wire.sendall(json.dumps(value).encode() + b"\n")

    def hear(self, limit_s: float) -> list[dict[str, Any]]:
        """A line of every rank; raises Hung if one does not arrive in time, Exited if a connection is closed."""
        deadline_s = time.monotonic() + limit_s
        heard = []
        for rank, (wire, file) in enumerate(self._wires):
            wire.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                line = file.readline()
            except TimeoutError:
                raise Hung(f"rank {rank}: no answer within {limit_s:g} s") from None
            except OSError:
                line = ""
            if not line:
                raise Exited(f"rank {rank}: ended")
            heard.append(json.loads(line))
        return heard

    def close(self) -> None:
        """Closes all sockets."""
        for wire, file in self._wires:
            file.close()
            wire.close()
