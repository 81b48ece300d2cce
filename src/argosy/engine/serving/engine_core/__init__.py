"""The engine core: the loop, its process, and the client that keeps it alive."""
