"""Files of other tools: `optcc verify FILE.xml` and `FILE.json`, `simulate` and `show` of both."""

from __future__ import annotations

import time
from pathlib import Path

import click

from optcc.cli import echo_card, echo_json
from optcc.errors import CodecError, InputError, PlanError
from optcc.files import read_file
from optcc.plan import Plan
from optcc.strict_xml import BYTES_MAX
from optcc.verdict import PROVED
from optcc.verify.gpu.msccl import MSCCL_TARGETS, verify_msccl
from optcc.verify.gpu.msccl_plan import plan_of_msccl
from optcc.verify.gpu.mscclpp import verify_mscclpp
from optcc.verify.gpu.mscclpp_plan import plan_of_mscclpp

ENDINGS = (".xml", ".json")


def is_foreign(name: str) -> bool:
    """Whether the argument of `verify` names a file of another tool, and no schedule."""
    return Path(name).suffix.lower() in ENDINGS


def read_foreign_plan(path: Path, size_bytes: int, what: str) -> tuple[Plan, str]:
    """The plan that the algorithm in a file amounts to, and the verdict on the file; a line on stderr says so if it is
    not proved, since then `what` is of a file that never runs.

    Raises what `plan_of_msccl` and `plan_of_mscclpp` raise.
    """
    data = read_file(path, BYTES_MAX)
    is_xml = data.lstrip().startswith(b"<")
    try:
        verdict = verify_msccl(data, path.name) if is_xml else verify_mscclpp(data, path.name)
        root = dict(verdict.conditions).get("result", "root 0").removeprefix("root ")
        plan = (plan_of_msccl if is_xml else plan_of_mscclpp)(data, size_bytes, root=int(root))
    except (CodecError, InputError, PlanError) as error:
        raise type(error)(f"file {str(path)!r}: {error}") from None
    if verdict.verdict != PROVED:
        wrong = "" if verdict.counterexample is None else f"; {verdict.counterexample.property}: "
        cause = "" if verdict.counterexample is None else verdict.counterexample.summary
        click.echo(f"optcc: {path.name}: {verdict.verdict}; {what}{wrong}{cause}", err=True)
    return plan, verdict.verdict


def verify_foreign(path: Path, target: str | None, as_json: bool) -> int:
    """Judges the file at `path` and prints the verdict; the exit code."""
    data = read_file(path, BYTES_MAX)
    is_xml = data.lstrip().startswith(b"<")
    targets = MSCCL_TARGETS if is_xml else ("mscclpp-json",)
    if target is not None and target not in targets:
        raise InputError(f"--target {target}: must be one of {', '.join(targets)} for {path.name}")
    started = time.perf_counter()
    try:
        verdict = verify_msccl(data, path.name, target) if is_xml else verify_mscclpp(data, path.name)
    except CodecError as error:
        raise CodecError(f"file {str(path)!r}: {error}") from None
    seconds = time.perf_counter() - started
    found = verdict.counterexample
    if as_json:
        echo_json(
            {
                "verdict": verdict.verdict,
                "properties": verdict.properties,
                "conditions": dict(verdict.conditions),
                "counterexample": None if found is None else found.as_json(),
                "seconds": seconds,
                "digest": verdict.digest,
            }
        )
    else:
        echo_card(verdict)
        if found is not None:
            click.echo(f"\n{found}")
        for name, condition in verdict.conditions:
            click.echo(f"{name} holds for {condition}")
    return verdict.exit_code
