"""Every rule of the verifier is held by a test: with any one of them taken out, some plan is judged wrongly.

A rule is taken out of the text of the verifier and the rest is loaded beside the real one, so that a rule is whatever a
few words of the source say. The plans are those of the negative corpus, each with its verdict; right plans, some of
which are right for one rule alone; and some mutants. If a text below is no longer there, the rule has been written in
another way: say here how to take it out now.

Some rules follow from others and are taken out together with these. Not in the list, because nothing can show them:
that a broadcast or an all-gather holds nobody else's input (nobody else has one there), and what only bounds work (the
horizon of a walk back, the number of subtrees that are looked at).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from optcc.plan import Plan
from optcc.verdict import PROPERTIES, PROVED, Verdict
from optcc.verify import plan as package
from optcc.verify.plan import verify_plan
from tests.differential.mutants import draw_mutant
from tests.negative.cases import hand, library
from tests.negative.corpus import CASES
from tests.negative.waiting import freed_slot, passed_around
from tests.sample import sampled

MODULES = ("plan_graph", "byte_partition", "matching", "deadlock", "races", "semantics", "explanation", "__init__")
"""The files of `optcc.verify.plan`, each after those that it imports."""
MUTANTS = 150
Verify = Callable[[Plan], Verdict]


@dataclass(frozen=True)
class Rule:
    """A rule of a module; `taken_out` is pairs of a text that must be there once, and what to write instead."""

    what: str
    module: str
    taken_out: tuple[tuple[str, str], ...]


def rule(what: str, module: str, *texts: str) -> Rule:
    """A rule with its texts in a row: old, new, old, new, ..."""
    return Rule(what, module, tuple(zip(texts[::2], texts[1::2], strict=True)))


def provenance(what: str, condition: str, instead: str) -> Rule:
    """One line of the table that holds instructions to their transfers."""
    return rule(f"an instruction {what}", "matching", condition, instead)


SENT_LENGTH = ("plan.bytes[sends] != transfers.bytes[sent]", "sent < 0")
RECEIVED_LENGTH = ("plan.bytes[receives] != transfers.bytes[received]", "received < 0")
EQUAL_LENGTHS = (
    " | (plan.bytes[sends] != plan.bytes[receives])",
    "",
    "plan.bytes[send] != plan.bytes[receive] or ",
    "",
)
"""Any two of these imply the third, so it takes two to let something through."""
FREE_BEFORE_SENT = """            if frees[i] >= 0:
                count = _reach(2 * frees[i] + 1, missing, order, count)
        else:
"""
FREE_WHEN_SENT = """        else:
            if frees[i] >= 0:
                count = _reach(2 * frees[i] + 1, missing, order, count)
"""
RULES = (
    # matching
    rule("a channel has as many sends as receives", "matching", "if send is None or receive is None:", "if False:"),
    rule(
        "the i-th send meets the i-th receive of its transfer",
        "matching",
        "unlike |= plan.send_transfer[sends] != plan.recv_transfer[receives]",
        "",
    ),
    rule(
        "a transfer between two ranks is sent and no local operation",
        "matching",
        "plan.send_transfer, remote)",
        "plan.send_transfer[:0], 0)",
        "rank[local] != transfers.src[done]",
        "done < 0",
    ),
    rule("every transfer is received once", "matching", "plan.recv_transfer, True)", "plan.recv_transfer[:0], 0)"),
    provenance("sends from its rank", "rank[sends] != transfers.src[sent]", "sent < 0"),
    provenance("sends its bytes", "read[sends] != transfers.src_offset[sent]", "sent < 0"),
    provenance("receives at its rank", "rank[receives] != transfers.dst[received]", "received < 0"),
    provenance("writes its bytes", "plan.dst_offset[receives] != transfers.dst_offset[received]", "received < 0"),
    rule("both ends are as long as their transfer", "matching", *SENT_LENGTH, *RECEIVED_LENGTH),
    rule("the sender is as long as the receiver or its transfer", "matching", *SENT_LENGTH, *EQUAL_LENGTHS),
    rule("the receiver is as long as the sender or its transfer", "matching", *RECEIVED_LENGTH, *EQUAL_LENGTHS),
    provenance("does its operation", "reduces[receives] != (transfers.op[received] == REDUCE)", "received < 0"),
    provenance("reads its bytes at home", "plan.src_offset[local] != transfers.src_offset[done]", "done < 0"),
    # who waits for whom
    rule(
        "a message waits for a slot",
        "plan_graph",
        "waits = np.flatnonzero((earlier >= 0) &",
        "waits = np.flatnonzero((earlier < -len(receiving)) &",
    ),
    rule("no more slots than the channel says", "plan_graph", "offered if slots is None", "offered + 1 if True"),
    rule("no fewer slots than the channel says", "plan_graph", "offered if slots is None", "1 if True"),
    rule(
        "slots are the lane's and not the channel's",
        "plan_graph",
        "lane = plan.instruction_lane[receiving]",
        "lane = plan.in_channel[receiving]",
    ),
    # deadlock
    rule(
        "the most patient run-time waits for what stands before in the lane",
        "deadlock",
        "missing[0::2] = (graph.lane_before >= 0) + ",
        "missing[0::2] = ",
        "if lane_next[i] >= 0:",
        "if lane_next[i] >= len(lane_next):",
    ),
    rule(
        "an instruction waits for what it comes after",
        "deadlock",
        " + np.diff(graph.after_first) + ",
        " + ",
        "for at in range(dependents_first[i], dependents_first[i + 1]):",
        "for at in range(0):",
    ),
    rule(
        "a receive waits for its message",
        "deadlock",
        " + (graph.sent_by >= 0)",
        "",
        "if met[i] >= 0:",
        "if met[i] >= len(met):",
    ),
    rule(
        "a send is done once there is a slot for its message",
        "deadlock",
        "1 + (graph.freed_by >= 0)",
        "1",
        "if frees[i] >= 0:",
        "if frees[i] >= len(frees):",
    ),
    rule(
        "a fused receive frees its slot before it has sent",
        "deadlock",
        FREE_BEFORE_SENT,
        FREE_WHEN_SENT,
    ),
    # races
    rule(
        "an access to two places at once is a race with itself",
        "races",
        "if (low != write_low[i] or high != write_high[i]) and",
        "if low < 0 and",
    ),
    rule(
        "a read comes after the last write",
        "races",
        "            last = writer[cell]\n            if last >= 0 and known[last] != i:",
        "            last = writer[cell]\n            if last >= len(known) and known[last] != i:",
    ),
    rule("a write comes after the last write", "races", "if readers[cell] < 0 and last >= 0 and", "if last < -1 and"),
    rule("a write comes after the reads since", "races", "while at >= 0:", "while at >= len(reader):"),
    rule(
        "what comes after is after",
        "races",
        "if after[at] == before:",
        "if after[at] < 0:",
        "for at in range(after_first[i], after_first[i + 1]):",
        "for at in range(0):",
    ),
    rule(
        "a lane orders what is issued, not what is done",
        "races",
        "_push(4 * lane_before[i], before,",
        "_push(4 * lane_before[i] + 3, before,",
    ),
    rule("a lane orders what is issued", "races", "if lane_before[i] >= 0:", "if lane_before[i] >= len(place):"),
    rule(
        "what is taken has come",
        "races",
        "if depth >= 0 and sent_by[i] >= 0:",
        "if depth >= 0 and sent_by[i] >= len(place):",
    ),
    rule(
        "a message comes, but its send may be done later",
        "races",
        "_push(4 * sent_by[i] + 2, before,",
        "_push(4 * sent_by[i] + 3, before,",
    ),
    rule(
        "what comes had a free slot",
        "races",
        "if depth >= 0 and freed_by[i] >= 0:",
        "if depth >= 0 and freed_by[i] >= len(place):",
    ),
    rule(
        "a plain receive is done when it frees its slot",
        "races",
        "4 * freeing + (1 if met[freeing] >= 0 else 3)",
        "4 * freeing + 1",
    ),
    rule(
        "a fused receive is not done when it frees its slot",
        "races",
        "4 * freeing + (1 if met[freeing] >= 0 else 3)",
        "4 * freeing + 3",
    ),
    rule(
        "what a fused receive sends has been taken",
        "races",
        "4 * i + (1 if fused else 0), before,",
        "4 * i, before,",
    ),
    rule(
        "a local operation reads",
        "byte_partition",
        "(plan.kind == SEND) | np.isin(plan.kind, list(LOCALS))",
        "plan.kind == SEND",
    ),
    # result and agreement
    rule(
        "what arrives has been written",
        "semantics",
        "if value < 0 or (reduces[i] and",
        "if (reduces[i] and value >= 0 and",
    ),
    rule(
        "what is reduced into has been written",
        "semantics",
        "if value < 0 or (reduces[i] and memory[cell] < 0):",
        "if value < 0:",
    ),
    rule(
        "a fused receive sends what it has written",
        "semantics",
        "source = write_at[i] if receives[i] else read_at[i]",
        "source = write_at[i] - width[i] if receives[i] else read_at[i]",
    ),
    rule("an element comes from its own place", "semantics", "value % n_atoms != atom or ", ""),
    rule("no contribution comes in twice", "semantics", " or seen[rank] or", " or"),
    rule("no contribution is missing", "semantics", "return bool(count == belongs[wanted, n_ranks])", "return True"),
    rule(
        "the output is written",
        "semantics",
        "    if value < 0:\n        return False",
        "    if value < 0:\n        return True",
    ),
    rule(
        "elements that nobody asks for may hold anything",
        "semantics",
        "if wanted[rank, atom] == -2:",
        "if wanted[rank, atom] == -3:",
    ),
    rule("all ranks add by one tree", "semantics", "other < rank and found[2] < 0:", "other < rank and found[2] < -1:"),
    rule("the two sides of a sum may change places", "semantics", "    if one > other:\n", "    if one < 0:\n"),
)


def loaded(broken: Rule | None) -> Verify:
    """The verifier without one rule, its inner loops interpreted; the real one stays as it is."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent
    names = [f"{package.__name__}.{name}".removesuffix(".__init__") for name in MODULES]
    real = {name: sys.modules.get(name) for name in names}
    try:
        for short, name in zip(MODULES, names, strict=True):
            source = (folder / f"{short}.py").read_text(encoding="utf-8")
            for old, new in broken.taken_out if broken is not None and broken.module == short else ():
                assert source.count(old) == 1, f"{short}.py has {source.count(old)} times: {old}"
                source = source.replace(old, new)
            module = ModuleType(name)
            sys.modules[name] = module
            exec(compile(source, f"<{short} without a rule>", "exec"), module.__dict__)
            if "compiled" in module.__dict__:
                module.__dict__["compiled"] = _interpreted
        changed: Verify = sys.modules[names[-1]].__dict__["verify_plan"]
        return changed
    finally:
        for name, module_ in real.items():
            if module_ is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_


def _interpreted(kernels: Sequence[FunctionType], namespace: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{kernel.__name__.removeprefix("_"): kernel for kernel in kernels})


@dataclass(frozen=True)
class Known:
    """A plan, and what the verifier must say of it: "proved", or the property that is broken."""

    what: str
    plan: Plan
    expected: str

    def misjudged(self, verify: Verify) -> str:
        """What `verify` says instead, or "". A verifier that crashes says something else, too."""
        try:
            verdict = verify(self.plan)
        except (AssertionError, IndexError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        said = verdict.counterexample.property if verdict.counterexample else verdict.verdict
        return "" if said == self.expected else said


def behind_what_waits() -> Plan:
    """Right because a lane issues in order: rank 1's local copy stands behind a send that waits for what both read."""
    return hand(
        3,
        """
        0>1 copy 0:1
        1>2 copy 0:1
        1>1 copy 0:1@1
        """,
        {0: "s0", 1: "r0 | s1<r0 l2", 2: "r1"},
        elements=1,
        scratch=1,
        collective="broadcast",
    )


def through_another_rank() -> Plan:
    """Right because a message comes after its send is issued: rank 0 sends once it has written its scratch space, and
    writes there again once it has the reply; the two writes have nothing else between them."""
    return hand(
        2,
        """
        0>1 copy 0:1
        1>0 copy 0:1@1
        0>0 copy 0:1@2
        0>0 copy 1:2@2
        """,
        {0: "l2 s0<l2 | r1 | l3<r1", 1: "r0 s1<r0"},
        elements=1,
        scratch=2,
        collective="broadcast",
    )


def passed_on_by_a_fused_receive() -> Plan:
    """The same, but rank 1 passes the message on as it comes."""
    return hand(
        2,
        """
        0>1 copy 0:1
        1>0 copy 0:1@1
        0>0 copy 0:1@2
        0>0 copy 1:2@2
        """,
        {0: "l2 s0<l2 | r1 | l3<r1", 1: "r0s1"},
        elements=1,
        scratch=2,
        collective="broadcast",
    )


def a_reply_is_no_proof_that_the_message_is_gone() -> Plan:
    """A race: rank 0 overwrites what it has sent once it has the reply; its send may still not be done."""
    return hand(
        2,
        """
        0>1 copy 0:1@1
        1>0 copy 1:2@1
        0>0 copy 1:2@0
        """,
        {0: "s0 | r1 | l2<r1", 1: "r0 s1<r0"},
        elements=1,
        scratch=1,
    )


def slots_of_two_channels() -> Plan:
    """Right with two slots in the lane: one for each sender, whichever comes first."""
    return hand(
        3,
        """
        0>2 copy 0:1
        0>1 copy 0:1
        1>2 copy 0:1@1
        """,
        {0: "s0 s1<s0", 1: "r1s2", 2: "r2 r0"},
        elements=1,
        scratch=1,
        slots=2,
        collective="broadcast",
    )


@cache
def known_plans() -> tuple[Known, ...]:
    """Plans by which a rule can be missed: right ones first, then the corpus, then mutants as they are judged now."""
    right = [
        Known(
            f"{name} of {ranks}, {slots} slots, fused {fused}",
            library(name, ranks, ranks, slots=slots, fused=fused).build(),
            PROVED,
        )
        for name, ranks in (("ring", 3), ("recursive-doubling", 4), ("bruck", 3), ("chain-reduce", 3), ("optcc", 3))
        for slots, fused in ((1, True), (2, False))
    ]
    right += [
        Known(make.__name__, make(), PROVED)
        for make in (behind_what_waits, through_another_rank, passed_on_by_a_fused_receive, slots_of_two_channels)
    ]
    wrong = [Known(case.what, case.make(), case.expected) for case in CASES if case.expected in PROPERTIES]
    reply = a_reply_is_no_proof_that_the_message_is_gone()
    wrong.append(Known("a reply is no proof that the message is gone", reply, "races"))
    special = [
        Known("a slot that orders two writes", freed_slot(slots=1, fused=False), "result"),
        Known("passed around a circle with one slot", passed_around(3), "result"),
    ]
    mutants = []
    for seed in range(MUTANTS):
        plan = draw_mutant(seed).plan
        if plan is not None:
            verdict = verify_plan(plan)
            expected = verdict.counterexample.property if verdict.counterexample else verdict.verdict
            mutants.append(Known(f"mutant {seed}", plan, expected))
    return (*right, *special, *wrong, *mutants)


def test_the_verifier_as_it_is_misjudges_none_of_them() -> None:
    """Also when its inner loops are interpreted."""
    changed = loaded(None)
    for known in known_plans():
        assert known.misjudged(verify_plan) == "", known.what
        assert known.misjudged(changed) == "", known.what


@pytest.mark.parametrize("broken", sampled(RULES, every=3), ids=lambda each: each.what.replace(" ", "-"))
def test_without_a_rule_some_plan_is_misjudged(broken: Rule) -> None:
    changed = loaded(broken)
    missed_by = next((known for known in known_plans() if known.misjudged(changed)), None)
    assert missed_by is not None, f"no plan holds the rule that {broken.what}"
    print(f"{broken.what}: {missed_by.what}: {missed_by.misjudged(changed)}")
