"""The mailboxes that the daemon's own process opens."""

from contextlib import ExitStack
from typing import Any

from actors.mailbox import Mailbox, ZmqContext
from actors.placement import AddressBook, Inbox


class Mail:
    """Opens the mailboxes of this process, each closed at the end of `opened` at the latest."""

    def __init__(self, context: ZmqContext, book: AddressBook, opened: ExitStack) -> None:
        self.context = context
        self.book = book
        self.here = book.seen_from("daemon")
        self.opened = opened

    def bind(self, inbox: Inbox, kind: Any, limit: int) -> Mailbox[Any]:
        """The receiving end of an inbox of this process."""
        return self._kept(Mailbox.bind(self.context, self.book.endpoints(inbox), kind, limit))

    def connect(self, endpoint: str, limit: int) -> Mailbox[Any]:
        """A sending end."""
        return self._kept(Mailbox.connect(self.context, endpoint, limit))

    def _kept(self, mailbox: Mailbox[Any]) -> Mailbox[Any]:
        self.opened.callback(mailbox.close)
        return mailbox
