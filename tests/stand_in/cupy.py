"""`import cupy` with this folder on PYTHONPATH: the stand-in, for the processes that a test starts."""

import os
import sys

from tests.unit.stand_in_cupy import StandIn
from tests.unit.stand_in_nccl import Nccl

made = StandIn(os.getpid(), n_devices=2)
if os.environ.get("STAND_IN_NCCL"):
    made.cuda.nccl = Nccl(made)
sys.modules[__name__] = made
