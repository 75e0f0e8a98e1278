"""From what a user passes as a loader to padded batches."""
