"""The HTTP edge: connections, requests, endpoints and callers. It knows no feature."""
