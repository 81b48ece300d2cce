"""Migration steps, one for each file. A released step is never changed."""
