"""Processors and the clock."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import System

STEAL_NOTE = 0.03
_CPU = "/sys/devices/system/cpu"


def check_cpu(system: System, need: Need) -> Iterator[Finding]:
    """Cores, what the hypervisor takes, frequency, hyperthreads, the clock."""
    cores = system.affinity()
    threads = system.read(f"{_CPU}/smt/active") == "1"
    value = f"{cores} this process may use" + (", two a core" if threads else "")
    why = f"{need.ranks_here} ranks here"
    if cores < need.ranks_here:
        why = f"{why} share them: times of short messages will be those of the scheduler"
    yield Finding("cpu", "cores", value, OK if cores >= need.ranks_here else NOTE, why)
    fields = (system.read("/proc/stat") or "cpu").splitlines()[0].split()[1:9]
    if len(fields) == 8:
        values = [int(part) for part in fields]
        share = values[7] / max(1, sum(values))
        why = "the hypervisor's share since the start; a bench repeats runs above 3 %"
        yield Finding("cpu", "steal", f"{100 * share:.1f} %", NOTE if share > STEAL_NOTE else OK, why)
    governors = {
        text
        for name in system.names(_CPU)
        if re.fullmatch(r"cpu\d+", name) and (text := system.read(f"{_CPU}/{name}/cpufreq/scaling_governor"))
    }
    if governors:
        slow = bool(governors - {"performance"})
        why = "clocks that rise and fall make times differ from run to run" if slow else "clocks stay up"
        do = "cpupower frequency-set -g performance" if slow else ""
        yield Finding("cpu", "governor", ", ".join(sorted(governors)), NOTE if slow else OK, why, do)
    base = "/sys/devices/system/clocksource/clocksource0"
    clock = system.read(f"{base}/current_clocksource")
    if clock is not None:
        slow = clock in ("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies")
        others = system.read(f"{base}/available_clocksource") or ""
        why = "reading it costs microseconds, and every poll reads it" if slow else "cheap to read"
        better = next(
            (name for name in ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page") if name in others.split()), ""
        )
        do = (
            f"echo {better} > {base}/current_clocksource"
            if slow and better
            else "clocksource=tsc at boot"
            if slow
            else ""
        )
        yield Finding("cpu", "clock source", clock, WRONG if slow else OK, why, do)
