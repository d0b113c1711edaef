"""Installed packages against what the distribution asks for, and the cache of proofs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import System

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=([0-9.]+))?.*?(?:extra == ['\"]([a-z]+)['\"])?$")
_FOR = {"fast": "checksums of messages in the processor's own instructions"}


def check_packages(system: System, _need: Need) -> Iterator[Finding]:
    """What the package asks for, and what its extras add, as far as a run needs them."""
    for text in system.requirements():
        match = _REQUIREMENT.match(text.replace(" ", "").replace("extra==", "extra == "))
        if match is None:
            continue
        name, least, extra = match[1], match[2] or "", match[3] or ""
        if extra not in ("", *_FOR):
            continue
        found = system.version(name)
        why = _FOR.get(extra, "everything needs it")
        do = f"pip install 'optcc[{extra}]'" if extra else f"pip install {name}"
        if found is None:
            yield Finding("packages", name, "not installed", NOTE if extra else WRONG, why, do)
        elif least and _numbers(found) < _numbers(least):
            yield Finding("packages", name, found, WRONG, f"must be {least} or newer", f"pip install '{name}>={least}'")
        else:
            yield Finding("packages", name, found, OK, why)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version.

    >>> _numbers("2.13.0+cpu"), _numbers("1.8rc1") < _numbers("1.8.1")
    ((2, 13, 0), True)
    """
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


def check_cache(system: System, _need: Need) -> Iterator[Finding]:
    """Where proofs are kept."""
    folder = system.cache()
    if folder is None:
        where = system.environment.get("XDG_CACHE_HOME") or f"{system.environment.get('HOME', '')}/.cache"
        why = "plans are proved anew at every start: it cannot be written, or others could have put files there"
        do = "export XDG_CACHE_HOME=/a/folder/of/your/own"
        yield Finding("cache", "folder", f"{where}/optcc: not usable", WRONG, why, do)
    else:
        yield Finding("cache", "folder", str(folder), OK, "proofs of plans are kept there")
