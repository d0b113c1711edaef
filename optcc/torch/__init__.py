"""The backend `optcc` of torch.distributed, for tensors in the host's memory.

    dist.init_process_group("optcc")

torch imports this module by itself (an entry point of `torch.backends`, from torch 2.5 on); a program for torch 2.4
imports it. torch is imported in this package alone, and in `optcc.runtime.launchers` for the store of a job.
`docs/pytorch.md` has what is supported.

    process_group.py    the operations, on tensors
    tensors.py          the memory of tensors, as arrays
    work.py             what an operation returns
    connect.py          how the ranks of a group meet, and what its plans are made for
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "optcc"


def register() -> None:
    """Makes the backend known to torch; what it needs is imported when the first group is made."""
    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(group: Any, options: Any) -> Any:
    from optcc.torch.process_group import create

    return create(group, options)


register()
