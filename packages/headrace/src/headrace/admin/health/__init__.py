"""Health: readiness, metrics, and what `headrace doctor` and `headrace reconcile` examine."""
