"""Faults and bad inputs: each done to a daemon by real processes, signals and sockets."""
