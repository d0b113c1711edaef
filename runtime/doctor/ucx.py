"""The UCX library: its version, and the devices that it reaches."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import System

UCX_VERSION_MIN = (1, 13)
_UCX_CODE = """
from optcc.runtime.transports.ucx_library import load
print(load().get_version_string().decode())
"""


def check_ucx(system: System, _need: Need) -> Iterator[Finding]:
    """The UCX library, its version, and what ways it offers."""
    asked = system.ask(_UCX_CODE)
    if asked is None or asked.code != 0:
        why = "the transport `ucx` is not there; the others are"
        last = asked.text.splitlines()[-1] if asked and asked.text else "no answer"
        do = "apt-get install libucx0, or pip install libucx-cu12"
        yield Finding("ucx", "library", "not found" if "EnvironmentMissing" in last else last, NOTE, why, do)
        return
    found = tuple(int(part) for part in re.findall(r"\d+", asked.text)[:2])
    if found < UCX_VERSION_MIN:
        wanted = ".".join(map(str, UCX_VERSION_MIN))
        yield Finding("ucx", "library", asked.text, WRONG, f"must be {wanted} or newer", "install a newer libucx")
        return
    yield Finding("ucx", "library", asked.text, OK, "the transport `ucx` takes it, one context a NIC")
    ran = system.run("ucx_info", "-d")
    if ran is None or ran.code != 0:
        yield Finding("ucx", "devices", "not known", NOTE, "ucx_info lists them", "apt-get install ucx-utils")
        return
    pairs = re.findall(r"Transport: (\S+)\s*\n#\s+Device: (\S+)", ran.text)
    ways = ", ".join(
        f"{transport}/{device}" for transport, device in pairs if transport not in ("self", "sysv", "posix")
    )
    yield Finding("ucx", "devices", ways or "none", OK if ways else NOTE, "ways to other hosts, as transport/device")
