"""The hello of a connection: it convinces only who knows the secret of this job."""

from __future__ import annotations

import pytest

from optcc.runtime.protocol.frames import WireError
from optcc.runtime.protocol.hello import Caller, Hello, Listener


@pytest.mark.battery(29)
def test_the_hello_convinces_only_who_knows_the_secret_of_this_job() -> None:
    secret, other, hello = bytes(32), b"x" * 32, Hello(0, 1, 0, bytes(16))
    for of_caller, of_listener in ((secret, other), (other, secret)):
        caller, listener = Caller(of_caller, hello, nonce=b"a" * 32), Listener(of_listener, nonce=b"b" * 32)
        with pytest.raises(WireError, match="does not know the secret"):
            caller.take(listener.take_hello(caller.opening))
        with pytest.raises(WireError, match="does not know the secret"):
            listener.take_proof(bytes(32))
    caller, listener = Caller(secret, hello, nonce=b"a" * 32), Listener(secret, nonce=b"b" * 32)
    answer = listener.take_hello(caller.opening)
    with pytest.raises(WireError, match="the caller"):
        listener.take_proof(answer[32:])
    proof = caller.take(answer)
    replayed = Listener(secret, nonce=b"c" * 32)
    replayed.take_hello(caller.opening)
    with pytest.raises(WireError, match="the caller"):
        replayed.take_proof(proof)
    listener.take_proof(proof)
    assert listener.session == caller.session != 0
