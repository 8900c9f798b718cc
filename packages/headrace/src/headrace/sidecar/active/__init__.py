"""Active consumers: instances that clients create, read and commit over HTTP."""
