"""Measurements on the dev cluster, with other products and bare loops: `make bench`."""
