"""Measurements against bare loops on the dev cluster: `make bench`."""
