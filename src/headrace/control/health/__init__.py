"""The health of consumers and clusters: status, lag, and the preconditions of the guarantees."""
