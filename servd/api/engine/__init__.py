"""From a checked request to the deltas of its answer."""
