"""The daemon Hearth: `runtime`, `actors`, `daemon` and `bench` are links to the folders at the top."""
