"""The library: every schedule by its name."""

from __future__ import annotations

from optcc.dsl import Definition
from optcc.schedules.optcc import optcc
from optcc.schedules.ring import ring

SCHEDULES: dict[str, Definition] = {definition.name: definition for definition in (ring, optcc)}
