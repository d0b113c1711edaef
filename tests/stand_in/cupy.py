"""`import cupy` with this folder on PYTHONPATH: the stand-in, for the processes that a test starts."""

import os
import sys

from tests.unit.stand_in_cupy import StandIn

sys.modules[__name__] = StandIn(os.getpid(), n_devices=2)
