"""The system that checks look at: this host, or in tests one that is wrong in a single way."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Protocol

from optcc.files import cache_directory
from optcc.runtime.nics import Interface, interfaces

PROGRAM_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program: its exit code and all that it said."""

    code: int
    text: str


class System(Protocol):
    """What checks may look at."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that a run would see."""
        ...

    @property
    def python(self) -> str:
        """The interpreter that runs."""
        ...

    @property
    def uid(self) -> int:
        """Who runs; 0 is root."""
        ...

    @property
    def host_name(self) -> str:
        """What `OPTCC_NIC_RATES` calls this host."""
        ...

    def read(self, path: str) -> str | None:
        """The text of a file without space at its ends, None if it cannot be read."""
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """What is in a folder, sorted; nothing if it is not there."""
        ...

    def link(self, path: str) -> str | None:
        """The last part of what a symbolic link points to, None if it is none."""
        ...

    def interfaces(self) -> Sequence[Interface]:
        """The interfaces that have an IPv4 address."""
        ...

    def find(self, program: str) -> str | None:
        """The path of a program: beside the interpreter if it has a slash in front, else on PATH; None if not there."""
        ...

    def run(self, *words: str) -> Ran | None:
        """What a program says, None if it is not there or does not end in time."""
        ...

    def ask(self, code: str) -> Ran | None:
        """What a piece of Python prints, in a process of its own."""
        ...

    def version(self, package: str) -> str | None:
        """The version of an installed Python package, None if it is not there."""
        ...

    def requirements(self) -> Sequence[str]:
        """What the distribution `optcc` asks for, as its metadata says it."""
        ...

    def limit(self, name: str) -> tuple[int, int]:
        """The soft and the hard limit called RLIMIT_name; -1 for none."""
        ...

    def cache(self) -> Path | None:
        """Where proofs are kept, None if that cannot be."""
        ...

    def affinity(self) -> int:
        """Processors that this process may use."""
        ...


@dataclass(frozen=True)
class Host:
    """This machine."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable

    @property
    def uid(self) -> int:
        """See `System`."""
        return os.geteuid()

    @property
    def host_name(self) -> str:
        """See `System`."""
        return socket.gethostname()

    def read(self, path: str) -> str | None:
        """See `System`."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """See `System`."""
        try:
            return tuple(sorted(entry.name for entry in Path(path).iterdir()))
        except OSError:
            return ()

    def link(self, path: str) -> str | None:
        """See `System`."""
        try:
            return Path(path).readlink().name
        except OSError:
            return None

    def interfaces(self) -> Sequence[Interface]:
        """See `System`."""
        return interfaces(may_be_down=True)

    def find(self, program: str) -> str | None:
        """See `System`."""
        if program.startswith("/"):
            beside = Path(self.python).with_name(program[1:])
            return str(beside) if os.access(beside, os.X_OK) else None
        path = self.environment.get("PATH", os.defpath)
        return shutil.which(program, path=f"{path}:/usr/local/sbin:/usr/sbin:/sbin")

    def run(self, *words: str) -> Ran | None:
        """See `System`."""
        program = words[0] if "/" in words[0] else self.find(words[0])
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=PROGRAM_TIMEOUT_S,
                env={"HOME": "/", **self.environment, "LC_ALL": "C"},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return Ran(done.returncode, done.stdout.strip())

    def ask(self, code: str) -> Ran | None:
        """See `System`."""
        return self.run(self.python, "-c", code)

    def version(self, package: str) -> str | None:
        """See `System`."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> Sequence[str]:
        """See `System`."""
        try:
            return metadata.requires("optcc") or ()
        except metadata.PackageNotFoundError:
            return ()

    def limit(self, name: str) -> tuple[int, int]:
        """See `System`."""
        import resource

        return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))

    def cache(self) -> Path | None:
        """See `System`."""
        return cache_directory(self.environment)

    def affinity(self) -> int:
        """See `System`."""
        return len(os.sched_getaffinity(0))
