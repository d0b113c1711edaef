"""Callers over real sockets: those who say hello as a rank does, and those who do not."""

from __future__ import annotations

import contextlib
import os
import socket

from optcc.runtime.protocol.hello import ANSWER_BYTES, Caller, Hello


def is_shut_out(sock: socket.socket) -> bool:
    """True once the other end has closed; then so has this one."""
    with sock:
        sock.settimeout(5.0)
        try:
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def call(address: tuple[str, int], data: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=5.0)
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    return sock


def enter(address: tuple[str, int], secret: bytes, hello: Hello) -> tuple[socket.socket, int]:
    """Says hello as a rank does; the connection and its session."""
    caller = Caller(secret, hello, nonce=os.urandom(32))
    sock = call(address, caller.opening)
    try:
        answer = b""
        while len(answer) < ANSWER_BYTES:
            data = sock.recv(ANSWER_BYTES - len(answer))
            if not data:
                raise ConnectionResetError("refused")
            answer += data
        sock.sendall(caller.take(answer))
    except BaseException:
        sock.close()
        raise
    return sock, caller.session
