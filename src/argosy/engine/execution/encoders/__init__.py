"""Encoders, whose tokens attend in both directions."""
