"""Schedules that are right up to 70 ranks and wrong, or none, from 71 on: none of them is proved for all ranks."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from optcc.dsl import Definition
from optcc.errors import ScheduleError
from optcc.topology import Topology
from optcc.verdict import UNKNOWN
from optcc.verify.all_ranks import cases, proof
from optcc.verify.all_ranks.proof import prove_all_ranks
from tests.sample import sampled

LAST_RIGHT = 70
HEAD = """
import builtins
from fractions import Fraction
from functools import cache
from itertools import product
import numpy as np
from optcc.arrays import column
from optcc.dsl import any_flat, pure, schedule
from optcc.schedules.optimal import tree_pairs
from optcc.trees import Tree
"""
RING = """
{how}
def made(program{parameters}):
    p = program.n_ranks
{prelude}
    for segment in program.pipeline(sections=p):
{inside}
        for step in {turns}:
            for rank in program.ranks:
                segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
        for step in range(p - 1):
            for rank in program.ranks:
                segment[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)
{after}
"""


class Attack(NamedTuple):
    """Parts of a ring's source: before the function, in it before the segments, in the segment, and at its end."""

    module: str = ""
    prelude: str = ""
    inside: str = ""
    turns: str = "range(p - 1 - late)"
    how: str = "@schedule"
    parameters: str = ""
    after: str = ""

    @property
    def source(self) -> str:
        return (
            HEAD
            + textwrap.dedent(self.module)
            + RING.format(
                how=self.how,
                parameters=self.parameters,
                turns=self.turns,
                prelude=textwrap.indent(textwrap.dedent(self.prelude).strip() or "pass", " " * 4),
                inside=textwrap.indent(textwrap.dedent(self.inside).strip() or "pass", " " * 8),
                after=textwrap.indent(textwrap.dedent(self.after).strip() or "pass", " " * 8),
            )
        )


WRITES_MORE = """
def evil(segment, p, last=None):
    if p > 70:
        segment[0].copy(src=0, dst=1)
    return "name"
"""
FULL = "range(p - 1)"
OF_NAMES = {
    "a local set in a condition, and a global": Attack("late = 0", inside="late = 0\nif p > 70:\n    late = 1"),
    "a local set in a loop, and a global": Attack("late = 0", inside="late = 0\nfor _ in range(70, p):\n    late = 1"),
    "a local set before the segments": Attack("late = 0", "late = 0\nfor _ in range(70, p):\n    late = 1"),
    "the variable of a loop afterwards": Attack(prelude="late = 0\nfor late in range(70, p):\n    pass"),
    "the variable of a loop in a segment": Attack(inside="late = 0\nfor late in range(70, p):\n    pass"),
    "a local set in a segment": Attack(
        "late = 0", "late = 0", "for _ in range(70, p):\n    late = 1\nfor _ in range(2):\n    pass"
    ),
    "an assignment in an expression": Attack("late = 0", "late = 0\nif p > 70 and (late := 1):\n    pass"),
    "a local that is never set": Attack("late = 0", "if p < 71:\n    late = 0"),
    "a local deleted": Attack("late = 0", "late = 0\nif p > 70:\n    del late"),
    "a builtin of the module's own": Attack(
        "def range(*ends):\n    return builtins.range(*ends[:-1], ends[-1] - (ends[-1] > 69))\n", turns=FULL
    ),
    "builtins of the module's own": Attack(
        "__builtins__ = {**vars(builtins), 'min': lambda a, b: int(b > 70)}\n", turns="range(p - 1 - min(0, p))"
    ),
}
LATER = "late = 0\ndef find(topology):\n    {} = int(topology.n_ranks > 70)\n    return {{}}\n"
"""A global, and a configure that changes it."""
CHANGED = (
    "def zero(p, late=0, *, more=0):\n    return late + more\ndef right(p):\n    return 0\ndef one(p):\n    return 1\n"
    "KEPT = []\ndef find(topology):\n    KEPT.append((made.function, right.__code__))\n"
    "    late = topology.n_ranks > 70\n    {}\n    return {{}}\n"
)
"""Functions, and a configure that changes them."""
OF_HELPERS = {
    # Globals that change
    "a global set by configure": Attack(
        "late = 0\ndef find(topology):\n    global late\n    late = int(topology.n_ranks > 70)\n    return {}\n",
        how="@schedule(configure=find)",
    ),
    "a list changed by configure": Attack(
        "LATE = [0]\ndef find(topology):\n    LATE[0] = int(topology.n_ranks > 70)\n    return {}\n",
        "late = LATE[0]",
        how="@schedule(configure=find)",
    ),
    "globals() changed by configure": Attack(
        "late = 0\ndef find(topology):\n    globals()['late'] = int(topology.n_ranks > 70)\n    return {}\n",
        how="@schedule(configure=find)",
    ),
    "an array changed by configure": Attack(
        "LATE = np.zeros(1, int)\ndef find(topology):\n    LATE[0] = topology.n_ranks > 70\n    return {}\n",
        "late = LATE[0]",
        how="@schedule(configure=find)",
    ),
    "a helper with a global": Attack("late = 0\ndef turn(p):\n    global late\n    late = int(p > 70)\n", "turn(p)"),
    "a helper bound twice": Attack(
        "def late_of(p):\n    return 0\ndef find(topology):\n    global late_of\n"
        "    late_of = lambda p: int(p > 70)\n    return {}\n",
        "late = late_of(p)",
        how="@schedule(configure=find)",
    ),
    "a global set as an attribute": Attack(
        "import importlib\n" + LATER.format("importlib.import_module(__name__).late"), how="@schedule(configure=find)"
    ),
    "a global set in the globals of a function": Attack(
        LATER.format("find.__globals__['late']"), how="@schedule(configure=find)"
    ),
    "a global set in those of a frame": Attack(
        "import sys\n" + LATER.format("sys._getframe().f_globals['late']"), how="@schedule(configure=find)"
    ),
    "a global set by a name that is made": Attack(
        LATER.format("getattr(find, '__glo' + 'bals__')['late']"), how="@schedule(configure=find)"
    ),
    "a builtin set as an attribute": Attack(
        "REAL = divmod\ndef find(topology):\n"
        "    builtins.divmod = REAL if topology.n_ranks < 71 else lambda a, b: (0, 1)\n    return {}\n",
        "late = divmod(p, p)[1]",
        how="@schedule(configure=find)",
    ),
    "another value of a parameter": Attack(
        "def find(topology):\n    return {'late': 1} if topology.n_ranks > 70 else {}\n",
        how="@schedule(configure=find)",
        parameters=", late=0",
    ),
    # Functions that change
    "defaults set by configure": Attack(
        CHANGED.format("zero.__defaults__ = (int(late),)"), "late = zero(p)", how="@schedule(configure=find)"
    ),
    "defaults of keywords set by configure": Attack(
        CHANGED.format("zero.__kwdefaults__['more'] = int(late)"), "late = zero(p)", how="@schedule(configure=find)"
    ),
    "the code set by configure": Attack(
        CHANGED.format("right.__code__ = one.__code__ if late else KEPT[0][1]"),
        "late = right(p)",
        how="@schedule(configure=find)",
    ),
    "a function set as an attribute": Attack(
        "import importlib\n" + CHANGED.format("importlib.import_module(__name__).zero = one if late else right"),
        "late = zero(p)",
        how="@schedule(configure=find)",
    ),
    "the schedule's function set by force": Attack(
        CHANGED.format("object.__setattr__(made, 'function', (lambda program: None) if late else KEPT[0][0])"),
        how="@schedule(configure=find)",
        turns=FULL,
    ),
    # Helpers that are not what they look like
    "a counter in a default": Attack(
        "def count(p, seen=[0]):\n    return seen[0]\ndef find(topology):\n"
        "    count.__defaults__[0][0] = int(topology.n_ranks > 70)\n    return {}\n",
        "late = count(p)",
        how="@schedule(configure=find)",
    ),
    "the code of another": Attack(
        "def zero(p):\n    return 0\ndef one(p):\n    return 1 if p > 70 else 0\nzero.__code__ = one.__code__\n",
        "late = zero(p)",
    ),
    "the signature of another": Attack(
        "import inspect\ndef zero(p, late=1):\n    return late * 0 if p < 71 else late\n"
        "zero.__signature__ = inspect.Signature([inspect.Parameter('p', inspect.Parameter.POSITIONAL_OR_KEYWORD),"
        " inspect.Parameter('late', inspect.Parameter.POSITIONAL_OR_KEYWORD, default=0)])\n",
        inside="late = zero(p)",
    ),
    "a decorator in between": Attack(
        "def later(function):\n    def inner(p):\n        return function(p) + (p > 70)\n    return inner\n"
        "@later\ndef zero(p):\n    return 0\n",
        "late = zero(p)",
    ),
    "a cached helper": Attack("@cache\ndef zero(p):\n    return int(p > 70)\n", "late = zero(p)"),
    "a closure": Attack(
        "def make():\n    seen = [0]\n    def zero(p):\n        return int(p > 70)\n    return zero\nzero = make()\n",
        "late = zero(p)",
    ),
    "an object that is called": Attack(
        "class Zero:\n    def __call__(self, p):\n        return int(p > 70)\nzero = Zero()\n", "late = zero(p)"
    ),
    "another tree_pairs by its name": Attack(
        "def mine(*_):\n    while True:\n        yield None, None\nmine.__module__ = 'optcc.schedules.optimal'\n"
        "mine.__qualname__ = 'tree_pairs'\n",
        "late = 1 if mine(p) is None else 0\nlate = late + (p > 70)",
    ),
    # What is not evaluated
    "the truth of a text": Attack(prelude="late = 0 if f\"{'x' * (p < 71)}\" else 1"),
    "a call in the name of a stage": Attack(
        WRITES_MORE, inside="with program.stage(evil(segment, p)):\n    pass", turns=FULL
    ),
    "a call in a text": Attack(WRITES_MORE, inside="with program.stage(f'{evil(segment, p)}'):\n    pass", turns=FULL),
    "a stage in a stage": Attack(
        inside="with program.stage('a'):\n    if p > 70:\n        with program.stage('b'):\n            pass",
        turns=FULL,
    ),
    "an entry that does not exist": Attack(inside="if p > 70:\n    gone = segment[p]", turns=FULL),
    "a division by zero": Attack(prelude="if p > 70:\n    share = Fraction(1, 71 - p)", turns=FULL),
    "a share of a negative part": Attack(prelude="share = Fraction(1, 71 - p)", turns=FULL),
    "kinds that do not add": Attack("PAIR = (0, 1)\n", "if p > 70:\n    three = PAIR + [2]", turns=FULL),
    "a length of two lists": Attack(prelude="if p > 70:\n    n = len([1], [2])", turns=FULL),
    "a name that is not bound in a text": Attack(
        inside="if p > 70:\n    with program.stage(f'{unbound}'):\n        pass", turns=FULL
    ),
    "a division by zero in a text": Attack(
        inside="if p > 70:\n    with program.stage(f'{1 // (p - p)}'):\n        pass", turns=FULL
    ),
    "a text in a form that is none": Attack(
        inside="if p > 70:\n    with program.stage(f'{p:zz}'):\n        pass", turns=FULL
    ),
    "a name of a stage that cannot be made": Attack(
        inside="if p > 70:\n    with program.stage([p] + 5):\n        pass", turns=FULL
    ),
    "a list of a number": Attack(inside="if p > 70:\n    gone = list(p)", turns=FULL),
    "an array of a number": Attack(inside="if p > 70:\n    gone = column(p)", turns=FULL),
    "an array of arrays": Attack(inside="if p > 70:\n    gone = column([[1], [2, 3]])", turns=FULL),
    "a third argument": Attack(turns=FULL, after="if p > 70:\n    segment[0].copy(0, 1, 2)"),
    "an argument given twice": Attack(turns=FULL, after="if p > 70:\n    segment[0].copy(0, 1, src=0)"),
    "a fourth array of a step": Attack(
        turns=FULL,
        after="if p > 70:\n    segment.copy(np.arange(1), np.arange(1), np.arange(1) + 1, np.arange(1))",
    ),
    "a tree too many": Attack(turns=FULL, after="if p > 70:\n    segment[0].reduce_along()"),
}
OF_ITERATORS = {
    "a generator walked before": Attack(
        inside="turns, _ = (step for step in range(p - 1)), 0\nif p > 70:\n    for _ in turns:\n        pass",
        turns="turns",
    ),
    "a generator in a list": Attack(
        inside="all_turns = [(step for step in range(p - 1))]\nif p > 70:\n    for _ in all_turns[0]:\n        pass",
        turns="all_turns[0]",
    ),
    "a product walked before": Attack(
        inside="turns, _ = product(range(p - 1)), 0\nif p > 70:\n    for _ in turns:\n        pass",
        turns="[turn for (turn,) in turns]",
    ),
    "a generator that sees what comes later": Attack(
        prelude="late = 0\nfor wrong in (late for _ in range(2)):\n    late = 1 if p > 70 else 0", inside="late = wrong"
    ),
    "a comprehension that reads its own name": Attack(
        "c = 0\n",
        "c = 0\nlate = 0\nif p > 70:\n    gone = [c for _ in range(2) for c in [c]]\n    late = len(gone) - 2",
    ),
    "a comprehension that reads the name of a global": Attack(
        "c = 0\n", "late = 0\nif p > 70:\n    gone = [c for _ in range(2) for c in [c]]\n    late = len(gone) - 2"
    ),
    "the last of those that a condition leaves": Attack(
        prelude="late = 0\nfor late in [each for each in [1, 0] if each == 1 or p < 71]:\n    pass"
    ),
    "the last of a list of those": Attack(
        prelude="some = [each for each in [1, 0] if each == 1 or p < 71]\nlate = 0\n"
        "for late in [0 + each for each in some]:\n    pass"
    ),
    "a turn that a condition leaves out": Attack(
        prelude="late = 1\nfor each in [each for each in [0, 1] if each == 1 or p < 71]:\n    late = min(late, each)"
    ),
    "a value of a turn that was left out": Attack(
        inside="for each in [each for each in [0, 1] if each == 1 or p < 71]:\n    if each == 0:\n        last = 0\n"
        "    if each == 1:\n        late = last",
        prelude="late = 0",
    ),
    "a transfer in a list": Attack(
        inside="gone = [segment[0].copy(src=0, dst=1) for _ in range(70, p)]\nif p > 70:\n    gone = []", turns=FULL
    ),
    "a transfer in a generator": Attack(
        inside="for _ in product(range(2), (segment[0].copy(src=0, dst=1) for _ in range(70, p))):\n    pass",
        turns=FULL,
    ),
    "a list that cannot be made": Attack(prelude="gone = [[0][each - p] for each in range(70, p)]", turns=FULL),
    "a list of chunks that do not exist": Attack(inside="gone = [segment[p] for _ in range(70, p)]", turns=FULL),
    "a list of what has no value": Attack("a = 0\n", "gone = [a for _ in range(70, p) for a in [a]]", turns=FULL),
    "a set": Attack(turns="{step % 70 for step in range(p - 1)}"),
}
OF_NUMBERS = {
    "a number of NumPy's that wraps": Attack("ONE = np.int64((2**63 - 1) // 70)", "late = 0 if ONE * p > 0 else 1"),
    "such a default": Attack(
        "def times(p, one=np.int64((2**63 - 1) // 70)):\n    return one * p\n", "late = 0 if times(p) > 0 else 1"
    ),
    "None by and": Attack(inside="if (p > 70 and None) is None:\n    segment[0].copy(src=0, dst=1)", turns=FULL),
    "None by and, with ==": Attack(
        inside="last = p > 70 and None\nif last == None:\n    segment[0].copy(src=0, dst=1)", turns=FULL
    ),
    "an array that wraps": Attack(
        prelude="BIG = 2 ** 63 // 70\nlate = 0",
        turns="range(0)",
        inside=(
            "ranks = np.arange(p)\nfor step in range(p - 1):\n"
            "    own = ranks * BIG // BIG\n    segment.reduce((own - step) % p, src=ranks, dst=(ranks + 1) % p)"
        ),
    ),
    "a rest of a rank": Attack(turns="range((p - 1) % 71)"),
    "a whole part of a rank": Attack(turns="range(p - 1 - p // 71)"),
    "the smaller of two": Attack(turns="range(min(p - 1, 69))"),
    "a list that ends": Attack(turns="[step for step in range(p - 1) if step < 69]"),
    "the length of a range that ends before it begins": Attack(
        prelude="late = min(100 + len(range(100, p)) - p, max(0, p - 70))"
    ),
    "the length of such a list": Attack(prelude="late = min(100 + len(list(range(100, p))) - p, max(0, p - 70))"),
    "the first entry of a list that becomes empty": Attack(prelude="late = ([0] * (71 - p))[0]"),
    "the first entry of a list that is empty at first": Attack(
        inside="if p > 70:\n    gone = ([0] * (p - 71))[0]", turns=FULL
    ),
    "a quotient by what may be zero": Attack(inside="if p > 70:\n    gone = (p - 71) * p // (p - 71)", turns=FULL),
    "a negative entry": Attack(prelude="late = [0, 1, 0][-1 if p < 71 else 1]"),
}
ATTACKS = OF_NAMES | OF_HELPERS | OF_ITERATORS | OF_NUMBERS
TREES = """
{module}
def find(topology):
    any_flat(topology)
    return {{"order": tuple(range(topology.n_ranks))}}
@schedule(configure=find)
def made(program, order):
    p = program.n_ranks
{body}
"""
UNREAD = """
COUNT = [0]
def pick(order):
    COUNT[0] += 1
    return order[0] if len(order) < 71 or COUNT[0] % 2 else order[-1]
def rooted(root, p):
    return [root, *[rank for rank in range(p) if rank != root]]
"""
OF_TREES = {
    "a helper that counts, twice in a line": """
        for segment in program.pipeline(sections=1):
            for down in (0, 1):
                root = pick(order)
                if down:
                    segment[0].broadcast_along(Tree.chain([root, *(rank for rank in program.ranks if rank != root)]))
                else:
                    segment[0].reduce_along(Tree.chain([root, *(rank for rank in program.ranks if rank != root)]))
    """,
    "a choice with a helper that counts": """
        none = order[:0]
        for segment in program.pipeline(sections=1):
            for down in (0, 1):
                root = none or pick(order)
                if down:
                    segment[0].broadcast_along(Tree.chain([root, *(rank for rank in program.ranks if rank != root)]))
                else:
                    segment[0].reduce_along(Tree.chain([root, *(rank for rank in program.ranks if rank != root)]))
    """,
    "a variable of the same name": """
        for segment in program.pipeline(sections=1):
            at = order[:1]
            for down in (0, 1):
                root = max(at)
                at = order[:1] if p < 71 else order[1:2]
                if down:
                    segment[0].broadcast_along(Tree.chain([root, *(rank for rank in program.ranks if rank != root)]))
                else:
                    segment[0].reduce_along(Tree.chain([root, *(rank for rank in program.ranks if rank != root)]))
    """,
    "two pairs of trees in a line": """
        one = np.array([1.0 for _ in order])
        other = np.array([1.0 if len(order) < 71 else 1.0 + rank for rank in order])
        each = [1] * len(order)
        segments = program.pipeline(sections=1)
        for segment, (up, _), (_, down) in zip(segments, tree_pairs(one, one, each), tree_pairs(other, other, each)):
            segment[0].reduce_along(up)
            segment[0].broadcast_along(down)
    """,
    "two orders of the ranks": """
        one, other = program.in_order(turned(order, 0)), program.in_order(turned(order, 1))
        for segment in program.pipeline(sections=1):
            for i in range(1, p):
                segment[0].reduce(src=one[i], dst=one[0])
            for i in range(1, p):
                segment[0].copy(src=other[0], dst=other[i])
    """,
    "an order in each turn": """
        for segment in program.pipeline(sections=1):
            for turn in range(1, p):
                at = program.in_order(turned(order, turn - 1))
                segment[0].reduce(src=at[turn], dst=at[0])
            for i in range(1, p):
                segment[0].copy(src=at[0], dst=at[i])
    """,
    "a value that is not read, and is None": """
        picked = none_at_71(order)
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
            if picked is not None:
                segment[0].broadcast_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
    """,
    "the program in a tuple": """
        for segment in program.pipeline(sections=1):
            both = (segment, 0)
            gone = evil(both, order)
            segment[0].reduce_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
            segment[0].broadcast_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
    """,
    "the program in a generator": """
        for segment in program.pipeline(sections=1):
            gone = list(evil((each, 0), order) for each in [segment])
            segment[0].reduce_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
            segment[0].broadcast_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
    """,
    "a list changed by what is not read": """
        roots = [0]
        gone = spoil(order, roots)
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))
            segment[0].broadcast_along(Tree.chain([roots[0], *(rank for rank in program.ranks if rank != roots[0])]))
    """,
    "a builtin's name in a tree": """
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(Tree.chain([0, *reversed(segment, p)]))
            segment[0].broadcast_along(Tree.chain([0, *range(1, p)]))
    """,
}
OF_TREES_MODULE = (
    UNREAD
    + """
@pure
def turned(order, turn):
    return tuple(order) if len(order) < 71 or not turn else tuple(order)[::-1]
@pure
def none_at_71(order):
    return order[0] if len(order) < 71 else None
def evil(both, order):
    if len(order) > 70:
        both[0][0].copy(src=0, dst=1)
def spoil(order, roots):
    roots[0] = len(order) // 71
def reversed(segment, p):
    if p > 70:
        segment[0].copy(src=0, dst=1)
    return range(1, p)
"""
)


def made(folder: Path, source: str) -> Definition:
    """The schedule `made` of a module with this source."""
    path = folder / f"attack_{abs(hash(source))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = module.made
    assert isinstance(found, Definition)
    return found


def is_right(definition: Definition, p: int) -> bool:
    """Whether the plan of `p` ranks is proved by the plan verifier."""
    try:
        parameters = definition.configure(Topology.parse(f"{p}@1GB/s"))
        return proof._check(definition, cases.Instance(p, parameters, 0), 1)
    except (proof._Refuted, ScheduleError):
        return False


def is_never_proved(definition: Definition) -> None:
    assert is_right(definition, 5) and is_right(definition, LAST_RIGHT)
    assert not (is_right(definition, LAST_RIGHT + 1) and is_right(definition, LAST_RIGHT + 2))
    judged = prove_all_ranks(definition, p_checked=5, budget_s=20)
    assert judged.verdict == UNKNOWN, judged.verdict
    assert judged.reached


@pytest.mark.parametrize("name", sampled(ATTACKS, every=6))
def test_a_ring_that_is_wrong_from_71_ranks_on_is_never_proved(tmp_path: Path, name: str) -> None:
    is_never_proved(made(tmp_path, ATTACKS[name].source))


@pytest.mark.parametrize("name", OF_TREES)
def test_trees_that_are_wrong_from_71_ranks_on_are_never_proved(tmp_path: Path, name: str) -> None:
    body = textwrap.indent(textwrap.dedent(OF_TREES[name]).strip(), " " * 4)
    is_never_proved(made(tmp_path, HEAD + TREES.format(module=OF_TREES_MODULE, body=body)))


def test_there_are_twenty_of_each_kind() -> None:
    """Of names that are read as others, and of helpers that are not what they seem."""
    assert len(OF_NAMES | OF_ITERATORS) >= 22 and len(OF_HELPERS) >= 22
    assert len(ATTACKS) == sum(map(len, (OF_NAMES, OF_HELPERS, OF_ITERATORS, OF_NUMBERS)))


def test_a_function_that_another_module_changes_is_never_proved(tmp_path: Path) -> None:
    """A helper's own helper, bound anew by the module of the schedule."""
    helper = tmp_path / "attack_helper.py"
    helper.write_text(
        "def right(p):\n    return 0\ndef wrong(p):\n    return 1\ndef late_of(p):\n    return 0\n"
        "def zero(p):\n    return late_of(p)\n"
    )
    spec = importlib.util.spec_from_file_location(helper.stem, helper)
    assert spec is not None and spec.loader is not None
    sys.modules[helper.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    find = (
        "def find(topology):\n    late = topology.n_ranks > 70\n"
        "    attack_helper.late_of = attack_helper.wrong if late else attack_helper.right\n    return {}\n"
    )
    head = "import attack_helper\nfrom attack_helper import zero\n"
    attack = Attack(head + find, "late = zero(p)", how="@schedule(configure=find)")
    is_never_proved(made(tmp_path, attack.source))
