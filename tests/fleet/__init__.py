"""A whole fleet on this machine: broker, daemon, two vLLM servers, gateway, clients."""
