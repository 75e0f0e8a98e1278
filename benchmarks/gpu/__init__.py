"""What to measure first where there is a GPU; see `__main__`."""
