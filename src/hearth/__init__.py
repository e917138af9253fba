"""The daemon Hearth; its packages are links to the folders at the top of the repository."""
