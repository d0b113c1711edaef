"""Plans as files of other tools: simulators, trace viewers and GPU run-times.

    write_goal(plan, topology)              GOAL text, for LogGOPSim and ATLAHS
    write_chakra(plan)                      Chakra execution traces, one a rank, for ASTRA-sim
    write_perfetto(plan, topology, timing)  the timeline of a predicted run, for ui.perfetto.dev
    write_msccl_xml(plan)                   an algorithm of MSCCL
    write_mscclpp_json(plan)                an execution plan of MSCCL++

Every writer returns whole files, the same bytes for the same plan, and refuses what its format cannot say.
docs/exports.md says field by field what is written, what is lost, and how to run the files in the other tools.
"""

from __future__ import annotations

from optcc.export.chakra import write_chakra
from optcc.export.goal import write_goal
from optcc.export.msccl import write_msccl_xml
from optcc.export.mscclpp import write_mscclpp_json
from optcc.export.perfetto import write_perfetto

__all__ = ["write_chakra", "write_goal", "write_msccl_xml", "write_mscclpp_json", "write_perfetto"]
