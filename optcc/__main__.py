"""`python -m optcc` is `optcc`."""

from optcc.cli import main

main()
