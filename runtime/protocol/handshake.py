"""Connections during their handshake: one that this rank opens, and one that somebody has opened to it. No I/O.

The driver gives the bytes that have come, at most `wanted` of them, and sends `reply`. When the handshake is over,
`session` is that of both ends and the endpoint makes a `SendConnection` or a `RecvConnection` of it.
"""

from __future__ import annotations

from collections.abc import Callable

from optcc.runtime.protocol.hello import ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES, Caller, Hello, Listener
from optcc.runtime.protocol.liveness import Connection


class Dialing(Connection):
    """A connection that this rank opens to `address` over its NIC `nic`; `peer` and `rail` say what for."""

    __slots__ = ("_caller", "_got", "address", "established", "nic", "peer", "rail", "session")

    def __init__(self, peer: int, rail: int, nic: int, address: tuple[str, int], caller: Caller) -> None:
        super().__init__()
        self.peer, self.rail, self.nic, self.address = peer, rail, nic, address
        self._caller, self._got, self.established, self.session = caller, b"", False, 0

    @property
    def opening(self) -> bytes:
        """What to send once the connection is established."""
        return self._caller.opening

    @property
    def wanted(self) -> int:
        """Bytes of the answer that are missing."""
        return ANSWER_BYTES - len(self._got)

    def take(self, data: bytes) -> bytes | None:
        """The proof to send, and `session`, once the answer is complete. Raises WireError."""
        self._got += data
        if len(self._got) < ANSWER_BYTES:
            return None
        proof = self._caller.take(self._got)
        self.session = self._caller.session
        return proof


class Accepting(Connection):
    """A connection that somebody has opened to this rank's NIC `nic`, and who has until `deadline_s` to say hello."""

    __slots__ = ("_got", "_is_answered", "_listener", "deadline_s", "nic", "session")

    def __init__(self, nic: int, listener: Listener, deadline_s: float) -> None:
        super().__init__()
        self._listener, self._got, self._is_answered = listener, b"", False
        self.nic, self.deadline_s, self.session = nic, deadline_s, 0

    @property
    def hello(self) -> Hello | None:
        """The caller's claim; unproved until `take` has returned True."""
        return self._listener.hello

    @property
    def wanted(self) -> int:
        """Bytes of the hello, or of the proof, that are missing."""
        return (PROOF_BYTES if self._is_answered else HELLO_BYTES) - len(self._got)

    def take(self, data: bytes, check: Callable[[Hello], None]) -> tuple[bytes, bool]:
        """(what to send, whether the handshake is over). `check` may refuse the hello before it is answered.

        Raises WireError.
        """
        self._got += data
        if self.wanted:
            return b"", False
        got, self._got = self._got, b""
        if self._is_answered:
            self._listener.take_proof(got)
            self.session = self._listener.session
            return b"", True
        answer = self._listener.take_hello(got)
        assert self._listener.hello is not None
        check(self._listener.hello)
        self._is_answered = True
        return answer, False
