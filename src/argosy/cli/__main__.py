"""`python -m argosy.cli` is `argosy`."""

from argosy.cli import main

main()
