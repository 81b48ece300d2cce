"""The control plane: what runs where, and keeping it so."""
