"""Memory that ranks of one host share."""

from __future__ import annotations

from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, Finding, Need
from optcc.runtime.doctor.system import System
from optcc.units import show_size

ROOM_BYTES_MIN = 64 << 20
"""For each rank: the slots of its plans that are kept."""
_CODE = """
from optcc.runtime.host_memory import probe_segment
print(probe_segment())
"""


def check_shared_memory(system: System, need: Need) -> Iterator[Finding]:
    """Whether a segment can be made in `/dev/shm`, and how much room there is for others."""
    asked = system.ask(_CODE)
    said = asked.text.strip().splitlines()[-1] if asked and asked.text.strip() else "no answer"
    if asked is None or asked.code or not said.isdecimal():
        why, do = "ranks of one host exchange data by TCP over loopback", "in containers --ipc=host or --shm-size"
        yield Finding("memory", "/dev/shm", said, NOTE, why, do)
        return
    wanted = ROOM_BYTES_MIN * need.ranks_here
    few = int(said) < wanted
    why = f"{need.ranks_here} ranks here exchange data by shared memory; plans for which there is no room go by TCP"
    do = f"mount -o remount,size={2 * wanted} /dev/shm; in containers --shm-size" if few else ""
    yield Finding("memory", "/dev/shm", f"{show_size(int(said))} free", NOTE if few else OK, why, do)
