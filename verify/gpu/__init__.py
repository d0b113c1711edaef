"""Judges algorithms for GPUs that other tools have written: MSCCL's XML and the execution plans of MSCCL++."""
