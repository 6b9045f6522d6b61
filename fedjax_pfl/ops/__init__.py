"""Pure functions that two or more methods share."""
