"""The running daemon: the loop, what it is built from, checkpoints, signals and systemd."""
