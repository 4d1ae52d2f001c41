"""`python -m shallower`."""

from shallower.cli import main

main()
