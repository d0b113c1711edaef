"""Logging, by the standard library's: one line an event, under the logger `optcc`.

    optcc.nics      what NICs are lost, slow or back, and when plans change: warnings
    optcc.events    rare events of the status, and why a run was given up: info; each collective: debug

Nothing is said below a warning unless a program sets a level, or OPTCC_LOG names one: then the lines go to stderr.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from optcc.errors import InputError

VARIABLE = "OPTCC_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_TIME = "%H:%M:%S"

events = logging.getLogger("optcc.events")


def configure(environ: Mapping[str, str]) -> None:
    """Has the lines of optcc printed on stderr if OPTCC_LOG says so; a second call changes nothing.

    Raises InputError for a level that there is not.
    """
    said = environ.get(VARIABLE, "").lower()
    if not said:
        return
    if said not in LEVELS:
        raise InputError(f"{VARIABLE}={said!r}: must be one of {', '.join(LEVELS)}")
    logger = logging.getLogger("optcc")
    logger.setLevel(LEVELS[said])
    if not any(isinstance(each, _Lines) for each in logger.handlers):
        logger.addHandler(_Lines())
        # Else a program that has set up logging as well prints each line twice.
        logger.propagate = False


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints lines on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT, _TIME))
