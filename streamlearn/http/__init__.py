"""What every HTTP endpoint of this package shares: the server, checks of requests, the token, the form of errors."""
