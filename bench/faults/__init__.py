"""`hearth bench faults`: what a daemon survives, with real processes, signals and sockets."""
