"""The text that the bundled models learn from, made by seeded templates."""
