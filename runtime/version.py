"""The version of Hearth, as engine folders and the service state it."""

VERSION = "0.1.0"
