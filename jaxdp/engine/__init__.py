"""The placed state of a run, and compiled steps taken on it."""
