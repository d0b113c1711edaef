"""Connections during their handshake: one that this rank opens, and one that somebody has opened to it. No I/O.

The driver gives the bytes that have come, at most `wanted` of them, and sends `reply`. When the handshake is over,
`session` is that of both ends, `keys` are None unless frames are authenticated, and the endpoint makes a
`SendConnection` or a `RecvConnection` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optcc.runtime.protocol.hello import ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES, RELAY, Caller, Hello, Keys, Listener
from optcc.runtime.protocol.liveness import Connection


class Dialing(Connection):
    """A connection that this rank opens to `address` over its NIC `nic`; `peer` and `rail` say what for.

    The last of `callers` is for the peer; those before it are for the ranks that pass on what follows. `n_answers` have
    answered.
    """

    __slots__ = ("_callers", "_got", "address", "established", "n_answers", "nic", "peer", "rail", "session")

    def __init__(self, peer: int, rail: int, nic: int, address: tuple[str, int], callers: Sequence[Caller]) -> None:
        super().__init__()
        self.peer, self.rail, self.nic, self.address = peer, rail, nic, address
        self._callers, self.n_answers, self._got, self.established, self.session = callers, 0, b"", False, 0

    @property
    def keys(self) -> Keys | None:
        """What the last rank that has answered and this one authenticate frames with, if they do."""
        return self._callers[self.n_answers - 1].keys if self.n_answers else None

    @property
    def opening(self) -> bytes:
        """What to send once the connection is established."""
        return self._callers[0].opening

    @property
    def wanted(self) -> int:
        """Bytes of the answer that are missing."""
        return ANSWER_BYTES - len(self._got)

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """(what to send, whether the handshake with the peer is over). Raises WireError."""
        self._got += data
        if self.wanted:
            return b"", False
        got, self._got = self._got, b""
        caller = self._callers[self.n_answers]
        proof, self.session = caller.take(got), caller.session
        self.n_answers += 1
        if self.n_answers == len(self._callers):
            return proof, True
        return proof + self._callers[self.n_answers].opening, False


class Accepting(Connection):
    """A connection that somebody has opened to this rank's NIC `nic`, and who has until `deadline_s` to say hello.

    `onward` is the hello that is to be passed on, once it is here.
    """

    __slots__ = ("_got", "_is_answered", "_is_proved", "_listener", "deadline_s", "nic", "onward", "session")

    def __init__(self, nic: int, listener: Listener, deadline_s: float) -> None:
        super().__init__()
        self._listener, self._got, self._is_answered, self._is_proved = listener, b"", False, False
        self.nic, self.deadline_s, self.session, self.onward = nic, deadline_s, 0, b""

    @property
    def keys(self) -> Keys | None:
        """What the caller and this rank authenticate frames with, if they do."""
        return self._listener.keys

    @property
    def hello(self) -> Hello | None:
        """The caller's claim; unproved until `take` has returned True."""
        return self._listener.hello

    @property
    def wanted(self) -> int:
        """Bytes of the hello, or of the proof, that are missing."""
        is_proof = self._is_answered and not self._is_proved
        return (PROOF_BYTES if is_proof else HELLO_BYTES) - len(self._got)

    def take(self, data: bytes, check: Callable[[Hello], None]) -> tuple[bytes, bool]:
        """(what to send, whether the handshake is over). `check` may refuse the hello before it is answered.

        Raises WireError.
        """
        self._got += data
        if self.wanted:
            return b"", False
        got, self._got = self._got, b""
        if self._is_proved:
            self.onward = got
            return b"", True
        if self._is_answered:
            self._listener.take_proof(got)
            self.session, self._is_proved = self._listener.session, True
            return b"", self.hello is not None and self.hello.rail != RELAY
        answer = self._listener.take_hello(got)
        assert self._listener.hello is not None
        check(self._listener.hello)
        self._is_answered = True
        return answer, False
