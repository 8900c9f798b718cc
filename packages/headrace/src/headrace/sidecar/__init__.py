"""The HTTP sidecar: produce, active consumers, and consumers that push."""
