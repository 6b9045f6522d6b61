"""Data sources, their division among clients, and the packed form that the device holds."""
