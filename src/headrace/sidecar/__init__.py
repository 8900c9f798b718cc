"""The HTTP sidecar: produce, and consumers that push."""
