"""In which order a plan adds: the trees of reductions that the verifier finds, as expressions.

Two plans with the same expression everywhere give the same bits for the same inputs, whatever else they do.
"""

from __future__ import annotations

from collections import Counter

from optcc.errors import InputError
from optcc.plan import Plan
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from optcc.verify.plan.byte_partition import carried_cuts
from optcc.verify.plan.deadlock import check_deadlock
from optcc.verify.plan.plan_graph import build_graph
from optcc.verify.plan.semantics import NOBODY, execute, wanted_inputs


def addition_orders(plan: Plan) -> dict[str, int]:
    """The expressions by which the result is made, as `(0 + 1) + 2` from the inputs of ranks, the commonest first; and
    how many bytes of the message each makes. `+` stands for the reduction, whose operands have no order.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> addition_orders(compile_schedule(ring(n_ranks=3), size_bytes=36))
    {'(0 + 1) + 2': 12, '0 + (1 + 2)': 12, '(0 + 2) + 1': 12}

    Raises InputError for a plan that is not proved.
    """
    if verify_plan(plan).verdict != PROVED:
        raise InputError(f"{plan.name}: must be proved before its additions are looked at")
    graph, cuts = build_graph(plan), carried_cuts(plan)
    made = execute(plan, graph, check_deadlock(plan, graph)[1], cuts)
    assert not isinstance(made, int), "a proved plan reads nothing that was not written"
    (values, (left, right)), n_atoms = made, len(cuts) - 1
    memory = values.reshape(plan.n_ranks, n_atoms)
    wanted, _ = wanted_inputs(plan, cuts)
    # Whose contributions a value has, and how they were added, are the same for most atoms: each such form is a number.
    forms: list[tuple[int, int]] = [(rank, -1) for rank in range(plan.n_ranks)]
    least = list(range(plan.n_ranks))
    known: dict[tuple[int, int], int] = {}
    leaves, form_of = memory.size, list[int]()

    def form(value: int) -> int:
        return value // n_atoms if value < leaves else form_of[value - leaves]

    for one, other in zip(left[: left[-1]].tolist(), right[: left[-1]].tolist(), strict=True):
        first, second = sorted((form(one), form(other)), key=least.__getitem__)
        number = known.setdefault((first, second), len(forms))
        if number == len(forms):
            forms.append((first, second))
            least.append(least[first])
        form_of.append(number)
    bytes_of: Counter[int] = Counter()
    for atom, n_bytes in enumerate((cuts[1:] - cuts[:-1]).tolist()):
        holder = next((rank for rank in range(plan.n_ranks) if wanted[rank, atom] != NOBODY), None)
        if holder is not None:
            bytes_of[form(int(memory[holder, atom]))] += n_bytes
    texts = _texts(forms, plan.n_ranks)
    return {texts[number]: n_bytes for number, n_bytes in bytes_of.most_common()}


def _texts(forms: list[tuple[int, int]], n_ranks: int) -> list[str]:
    """The expression of each form; operands have smaller numbers."""
    texts = [str(rank) for rank in range(n_ranks)]
    for first, second in forms[n_ranks:]:
        operands = (texts[each] if each < n_ranks else f"({texts[each]})" for each in (first, second))
        texts.append(" + ".join(operands))
    return texts
