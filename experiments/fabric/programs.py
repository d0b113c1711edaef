"""Programs, rights and files of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from optcc.errors import EnvironmentMissing, InputError, RuntimeFault
from optcc.experiments.fabric.scripts import SOCKET_BYTES_MAX
from optcc.experiments.fabric.state import demand

_COMMAND_TIMEOUT_S: Final = 30.0
STATE_BYTES_MAX: Final = 2**20


def can_make_namespaces() -> str | None:
    """None if this process may build fabrics here, else the reason in one sentence. Leaves nothing behind."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux only, this is {sys.platform}"
    if os.geteuid() != 0:
        return not_root()
    missing = [program for program in ("ip", "tc", "unshare", "setpriv") if which(program) is None]
    if missing:
        return f"{missing[0]} is not installed: apt-get install iproute2 util-linux"
    # One namespace that lives as long as this shell, with one of each kind of thing that a fabric is made of.
    trial = [
        "ip link add name a type veth peer name b",
        "ip link add name c type bridge",
        "tc qdisc add dev a root tbf rate 1mbit burst 131072 limit 131072",
    ]
    try:
        call(["unshare", "--net", "--mount", "--uts", "sh", "-c", " && ".join(trial)], label="trial namespace")
    except RuntimeFault as error:
        return f"the kernel refuses a {error}"
    return None


def not_root() -> str:
    return f"not root (uid {os.geteuid()}): network namespaces want root, for example sudo"


def system_path() -> str:
    """PATH with the system's own folders, even where it leaves them out."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def which(program: str) -> str | None:
    """The path of a program; the system's own folders count even where PATH leaves them out."""
    return shutil.which(program, path=system_path())


def program_path(program: str, package: str = "iproute2") -> str:
    found = which(program)
    if found is None:
        raise EnvironmentMissing(f"{program} is not installed: apt-get install {package}")
    return found


def call(argv: Sequence[str], text: str = "", *, label: str | None = None) -> str:
    """What a program prints, given `text`; raises RuntimeFault with `label` (the command) and its first complaint."""
    what = shlex.join(argv)[:80] if label is None else label
    try:
        done = subprocess.run(
            [program_path(argv[0]), *argv[1:]],
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            env={"HOME": "/", **os.environ, "PATH": system_path(), "LC_ALL": "C"},  # mpirun will not start without HOME
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeFault(f"{what}: not done after {_COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        complaint = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise RuntimeFault(f"{what}: {complaint}")
    return done.stdout


def require_right() -> None:
    """Raises EnvironmentMissing unless this process may look at and change namespaces."""
    if os.geteuid() != 0:
        raise EnvironmentMissing(f"fabric: {not_root()}")
    program_path("ip")
    program_path("tc")


def check_private(path: Path) -> None:
    """Raises InputError unless `path` is a folder of ours that nobody else can write."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise InputError(f"{path}: must be a folder of uid {os.geteuid()} that nobody else can write")


def remove(path: Path) -> None:
    """Removes a file, link or tree, if there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Replaces a file atomically: a reader sees the old text or the new."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def read_state_file(path: Path) -> str:
    """The text of a regular file of ours; raises OSError or ValueError otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        demand(stat.S_ISREG(found.st_mode), "not a regular file")
        demand(found.st_uid == os.geteuid(), f"owned by uid {found.st_uid}")
        data = file.read(STATE_BYTES_MAX + 1)
    demand(len(data) <= STATE_BYTES_MAX, "too long")
    return data.decode("utf-8")


def allow_cubic() -> list[str]:
    """Lets namespaces choose cubic and sockets of 1 MiB; notes on each setting of the machine that this changed."""
    notes: list[str] = []
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    words = allowed.read_text(encoding="ascii").split()
    if "cubic" not in available:
        raise EnvironmentMissing(f"this kernel has no TCP cubic, only {', '.join(available)}")
    if "cubic" not in words:
        _set_machine(allowed, " ".join([*words, "cubic"]), notes)
    for ceiling in ("rmem_max", "wmem_max"):
        path = Path("/proc/sys/net/core") / ceiling
        if int(path.read_text(encoding="ascii")) < SOCKET_BYTES_MAX:
            _set_machine(path, str(SOCKET_BYTES_MAX), notes)
    return notes


def _set_machine(path: Path, value: str, notes: list[str]) -> None:
    try:
        path.write_text(value, encoding="ascii")
    except OSError as error:
        raise EnvironmentMissing(f"{path}: cannot be set to {value} ({error.strerror})") from None
    notes.append(f"set {'.'.join(path.parts[3:])} = {value} for this machine")
