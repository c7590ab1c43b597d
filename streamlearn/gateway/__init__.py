"""The gateway: a stateless process without torch that speaks OpenAI's API in front of a fleet of model servers."""
