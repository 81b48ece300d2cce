"""Settings of a gateway, each section with its own structure."""
