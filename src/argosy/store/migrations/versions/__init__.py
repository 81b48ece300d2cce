"""Migration steps, one for each file. Each changes the tables of the version before. A released one never changes."""
