"""What operators do: live control of consumers, dead letters, replays, jobs, registrations, doctor."""
