"""One run in several processes that torchrun starts: rank 0 leads, the others compute their shares of each step."""
