"""The mailboxes that the daemon's own process opens."""

from contextlib import ExitStack
from typing import Any

from actors.addresses import AddressBook, Inbox
from actors.mailbox import Receiver, Sender, ZmqContext


class Mail:
    """Opens the mailboxes of this process, each closed at the end of `opened` at the latest."""

    def __init__(self, context: ZmqContext, book: AddressBook, opened: ExitStack) -> None:
        self.context = context
        self.book = book
        self.here = book.seen_from("daemon")
        self.opened = opened

    def bind(self, inbox: Inbox, kind: Any, limit: int) -> Receiver[Any]:
        """The receiving end of an inbox of this process."""
        receiver: Receiver[Any] = Receiver(self.context, self.book.endpoints(inbox), kind, limit)
        return self.opened.enter_context(receiver)

    def connect(self, endpoint: str, limit: int) -> Sender[Any]:
        """A sending end."""
        sender: Sender[Any] = Sender(self.context, endpoint, limit)
        return self.opened.enter_context(sender)
