"""The front door: it authenticates, admits, routes, streams and meters."""
