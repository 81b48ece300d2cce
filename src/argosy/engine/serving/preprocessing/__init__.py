"""What can be refused is refused here; what passes becomes engine requests."""
