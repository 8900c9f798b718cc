"""Whole processes of Headrace on virtual time, driven by one seed."""
