"""What we measure; `record` keeps it as data."""
