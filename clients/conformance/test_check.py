"""Each client's own build and tests, also of those that have no driver."""

from clients.conformance.driving import Client


def test_the_check_passes(client: Client) -> None:
    # The fixture has run it.
    assert (client.folder / "README.md").is_file()
