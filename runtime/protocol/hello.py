"""The handshake of a connection: both ends prove that they know the secret of the job. No I/O.

    caller    hello: version, rail, source and destination rank, job, nonce
    listener  answer: nonce, proof over both
    caller    proof over both

A hello of the rail `RELAY` asks a rank to pass on another hello, which follows the proof (`relay`). The proofs are
HMAC-SHA-256 under different labels, so a reflected answer is no proof. The handshake authenticates the peer. What
follows is not encrypted, and authenticated only if both ends are set up so (`sealing`): then the highest bit of the
version is set, and HMAC-SHA-256 under two more labels gives each direction its key, from the secret and both nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

from optcc.runtime.protocol.frames import VERSION, WireError

SECRET_BYTES = 32
JOB_BYTES = 16
NONCE_BYTES = 32
RELAY = 0xFFFF
_MAC_BYTES = 32
_AUTHENTICATE = 1 << 15
_MAGIC = b"optcc-tc"
_HELLO = struct.Struct(f"!8sHHII{JOB_BYTES}s{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
ANSWER_BYTES = NONCE_BYTES + _MAC_BYTES
PROOF_BYTES = _MAC_BYTES


@dataclass(frozen=True, slots=True)
class Hello:
    """What a connection is for: data from `src` to `dst` over the `rail`-th rail of the pair, in `job`.

    With `authenticate`, frames have tags.
    """

    src: int
    dst: int
    rail: int
    job: bytes
    authenticate: bool = False

    @staticmethod
    def read(opening: bytes) -> Hello:
        """What a caller's opening says; raises WireError if this is no hello of this version."""
        magic, version, rail, src, dst, job, _ = _HELLO.unpack(opening)
        if magic != _MAGIC:
            raise WireError("hello: not one of optcc")
        if version & ~_AUTHENTICATE != VERSION:
            raise WireError(f"hello: version {version & ~_AUTHENTICATE}: must be {VERSION}")
        return Hello(src, dst, rail, job, bool(version & _AUTHENTICATE))


class Keys(NamedTuple):
    """The keys of a connection, 32 bytes each: of what the caller sends, and of what the listener sends."""

    of_caller: bytes
    of_listener: bytes


class Caller:
    """The end that opens the connection: sends `opening`, receives the answer, and sends what `take` returns.

    >>> secret, hello = bytes(32), Hello(0, 1, 0, bytes(16))
    >>> caller = Caller(secret, hello, nonce=bytes(32))
    >>> listener = Listener(secret, nonce=bytes(range(32)))
    >>> listener.take_proof(caller.take(listener.take_hello(caller.opening)))
    >>> listener.hello == hello, listener.session == caller.session
    (True, True)
    """

    def __init__(self, secret: bytes, hello: Hello, *, nonce: bytes) -> None:
        self._secret, self._authenticate = secret, hello.authenticate
        version = VERSION | _AUTHENTICATE if hello.authenticate else VERSION
        self.opening = _HELLO.pack(_MAGIC, version, hello.rail, hello.src, hello.dst, hello.job, nonce)
        self.session = 0
        self.keys: Keys | None = None

    def take(self, answer: bytes) -> bytes:
        """The proof that answers the answer; raises WireError if the other end does not know the secret."""
        transcript = self.opening + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _mac(self._secret, b"answer", transcript)):
            raise WireError("hello: the other end does not know the secret of this job")
        self.session = _session(self._secret, transcript)
        self.keys = _keys(self._secret, transcript) if self._authenticate else None
        return _mac(self._secret, b"proof", transcript)


class Listener:
    """The end that accepts the connection: receives the hello, answers it, and checks the proof."""

    def __init__(self, secret: bytes, *, nonce: bytes) -> None:
        self._secret, self._nonce = secret, nonce
        self._transcript = b""
        self.hello: Hello | None = None
        self.session = 0
        self.keys: Keys | None = None

    def take_hello(self, opening: bytes) -> bytes:
        """The answer; raises WireError if this is no hello of this version."""
        self.hello = Hello.read(opening)
        self._transcript = opening + self._nonce
        return self._nonce + _mac(self._secret, b"answer", self._transcript)

    def take_proof(self, proof: bytes) -> None:
        """Raises WireError unless the caller knows the secret; then `session` is that of both."""
        if not hmac.compare_digest(proof, _mac(self._secret, b"proof", self._transcript)):
            raise WireError("hello: the caller does not know the secret of this job")
        self.session = _session(self._secret, self._transcript)
        assert self.hello is not None
        self.keys = _keys(self._secret, self._transcript) if self.hello.authenticate else None


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, hashlib.sha256)


def _session(secret: bytes, transcript: bytes) -> int:
    return int.from_bytes(_mac(secret, b"session", transcript)[:4], "big")


def _keys(secret: bytes, transcript: bytes) -> Keys:
    return Keys(_mac(secret, b"key of the caller", transcript), _mac(secret, b"key of the listener", transcript))
