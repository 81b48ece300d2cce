"""Declaration of a fleet: its file, the text that the store keeps, and the differences between two declarations."""
