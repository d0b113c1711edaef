"""`allgather` and `barrier` over the messages of one channel of each pair (`bruck`). No I/O."""

from __future__ import annotations

from optcc.runtime.protocol.bruck import Gathering
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.frames import EXCHANGE


class Exchange:
    """One rank's part of an allgather that is under way."""

    def __init__(self, endpoint: Endpoint, payload: bytes) -> None:
        self._gathering = Gathering(endpoint.rank, len(endpoint.book), payload)
        self._rounds = []
        for each in self._gathering.rounds:
            outbound, inbound = endpoint.outbound(each.dst), endpoint.inbound(each.src)
            sends, receives = outbound.channel(EXCHANGE), inbound.channel(EXCHANGE)
            self._rounds.append((outbound, sends, sends.n_sent + 1, receives, receives.n_received + 1, each.out.data))
            inbound.post(receives, each.into.data)
        self._n_posted = self._n_done = 0

    def step(self) -> bool:
        """Goes on as far as messages have come; True when it is over.

        It is not over before everything of this rank is acknowledged: a peer that waits for it would wait in vain if
        this rank went away.
        """
        while self._n_done < len(self._rounds):
            outbound, sends, _, receives, n_received, view = self._rounds[self._n_done]
            if self._n_posted == self._n_done:
                outbound.post(sends, view)
                self._n_posted += 1
            if not receives.has_received(n_received):
                return False
            self._n_done += 1
        return all(sends.has_sent(n_sent) for _, sends, n_sent, *_ in self._rounds)

    @property
    def parts(self) -> list[bytes]:
        """Every rank's payload, by rank, once it is over."""
        return self._gathering.parts
