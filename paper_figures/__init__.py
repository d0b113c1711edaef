"""Figures and numbers of the paper, made from records and from nothing else."""
