"""The status that the training loop publishes, and the board it is read from."""
