"""The HTTP endpoint: it reads the published status and queues jobs, and never accesses the model."""
