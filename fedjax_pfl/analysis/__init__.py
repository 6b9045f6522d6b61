"""What can be asked of a federation beyond its scores."""
