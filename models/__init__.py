"""The shipped home-and-robot model: its data, its training and its evaluation."""
