"""The transports: each passes `optcc.runtime.conformance.check_transport`."""
