"""Reactive consumers that teams register over HTTP."""
