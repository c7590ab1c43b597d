"""The local HTTP endpoint: it reads a published status and queues jobs; it never touches the model."""
