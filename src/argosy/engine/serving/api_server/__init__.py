"""The replica as an HTTP server: routes, streams, drain."""
