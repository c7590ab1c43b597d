"""The running process: it reads, learns, saves and answers controls."""
