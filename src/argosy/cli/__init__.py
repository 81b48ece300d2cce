"""The `argosy` command."""


def main() -> None:
    """Run the command line; exits with its status."""
    from argosy.cli.app import app

    app()


__all__ = ["main"]
