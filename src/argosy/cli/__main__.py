"""Entry point of `python -m argosy.cli`, which is the `argosy` command."""

from argosy.cli import main

main()
