"""Pure functions that two methods or more share."""
