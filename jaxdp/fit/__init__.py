"""A fit, from its first batch to its last checkpoint."""
