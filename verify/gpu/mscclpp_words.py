"""Words that several threads send to one place: signals of a channel, tokens of a semaphore.

A wait counts: the c-th one ends when c words have come, whosever they are. So it is sure to have had a word only if
fewer than c of the others can come before that word, which are those that do not come after it. Whether one word comes
after another says the clock of its sender, which counts what each sender has sent there.

Words that are sent later could have come before a wait that has ended: if one of them makes a word unsure that a wait
has learned from, nothing is known, and the plan is not judged. Waits therefore come last, when nothing else can go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optcc.arrays import Column
from optcc.verify.gpu.mscclpp_channels import ThreadName
from optcc.verify.gpu.mscclpp_state import Known


@dataclass(slots=True)
class _Word:
    """What it says; what its sender knew, with the entry and count of the word itself; how many of the others need not
    come after it; and the number of the wait that was sure of it, 0 for none."""

    said: Known
    clock: Column
    entry: int
    count: int
    before: int
    sure_at: int = 0


class SharedWords:
    """Those of one channel's end, or semaphore; `senders` and `waits` are entries of clocks: how many words each thread
    has sent, and how many waits are over. At the start are `first` words that say nothing."""

    def __init__(self, senders: dict[ThreadName, int], waits: int, first: int) -> None:
        self.senders, self.waits = senders, waits
        self.first, self.taken = first, 0
        self.words: list[_Word] = []

    def put(self, word: Known, sender: Known, name: ThreadName) -> bool:
        """Sends a word; false if a wait might have had it in place of one that it learned from."""
        entry = self.senders[name]
        sender.all[entry] += 1
        word.all[entry] = sender.all[entry]
        new = _Word(word, sender.all.copy(), entry, int(sender.all[entry]), self.first + len(self.words))
        for each in self.words:
            each.before += new.clock[each.entry] < each.count
        self.words.append(new)
        return all(each.before < each.sure_at for each in self.words if each.sure_at)

    def has_more(self) -> bool:
        return self.taken < self.first + len(self.words)

    def is_next(self, waiter: Known) -> bool:
        """Whether all waits so far are over, as far as the one who waits knows."""
        return int(waiter.all[self.waits]) == self.taken

    def take(self, waiter: Known) -> Known:
        """Ends a wait: what it is sure to have had, with those before it."""
        self.taken += 1
        waiter.all[self.waits] = self.taken
        learned = Known(np.zeros_like(waiter.all), np.zeros_like(waiter.all))
        for each in self.words:
            if not each.sure_at and each.before < self.taken:
                each.sure_at = self.taken
                learned.learn(each.said)
        return learned
