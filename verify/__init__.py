"""Bounds with certificates, and the verifier of compiled plans."""
