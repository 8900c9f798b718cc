"""What operators do: look at topics and groups, and bring dead letters back."""
