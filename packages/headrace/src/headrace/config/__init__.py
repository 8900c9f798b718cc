"""What can be set: models, loading, references, environment overrides."""
