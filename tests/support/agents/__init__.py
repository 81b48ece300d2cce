"""Agent frameworks that run against a server: a tool loop and a typed answer for each."""
