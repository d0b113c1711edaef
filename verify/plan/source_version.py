"""Which verifier this is: a hash of the source that a verdict on a plan rests on."""

from __future__ import annotations

import hashlib
import secrets
import sys
from pathlib import Path

import numpy as np

from optcc import arrays

TRUSTED = (
    *(f"verify/plan/{name}.py" for name in ("__init__", "plan_graph", "byte_partition", "matching", "deadlock")),
    *(f"verify/plan/{name}.py" for name in ("races", "semantics", "source_version")),
    *(f"{name}.py" for name in ("plan", "collective", "transfers", "arrays", "compiled", "verdict", "schedule")),
    *(f"{name}.py" for name in ("timing", "show", "units", "errors")),
)
"""The files of `optcc` that a verdict on a plan rests on: all that `optcc.verify.plan` imports."""


def source_version() -> str:
    """Changes with every change of these files, of Python and of NumPy; where they cannot be read, with every call."""
    digest = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    package = Path(arrays.__file__).parent
    try:
        for name in TRUSTED:
            source = (package / name).read_bytes()
            digest.update(f"{name} {len(source)} ".encode() + source)
    except OSError:
        return secrets.token_hex(32)
    return digest.hexdigest()
