"""The HTTP edge: connections, requests, endpoints and callers. It imports and names no feature."""
