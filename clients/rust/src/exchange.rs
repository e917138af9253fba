//! One request and its answers, between the thread that receives and a caller who waits.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::error::{Code, Error};
use crate::protocol::{Accepted, Delta, Done, StatusReport, TokenId, Welcome};

/// What a request asks for, which is what may end it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Welcome,
    Generation,
    Tokens,
    Text,
    Status,
}

/// The last answer to a request.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Welcome(Box<Welcome>),
    Done(Box<Done>),
    Tokens(Vec<TokenId>),
    Text(String),
    Status(Box<StatusReport>),
}

impl End {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Welcome(_) => Kind::Welcome,
            Self::Done(_) => Kind::Generation,
            Self::Tokens(_) => Kind::Tokens,
            Self::Text(_) => Kind::Text,
            Self::Status(_) => Kind::Status,
        }
    }
}

/// What ends a request whose answer is of another kind than it asks for.
pub(crate) fn of_another_kind() -> Error {
    Error::new(
        Code::ProtocolViolation,
        "the server answered with another kind of message",
    )
}

/// Answers so far. `end` is set once, and nothing is added from then on.
#[derive(Debug, Default)]
pub struct Answers {
    pub(crate) accepted: Option<Accepted>,
    deltas: VecDeque<(Delta, usize)>,
    bytes: usize,
    pub(crate) end: Option<Result<End, Error>>,
    abandoned: bool,
    waker: Option<Waker>,
}

impl Answers {
    pub(crate) fn pop(&mut self) -> Option<Delta> {
        let (delta, bytes) = self.deltas.pop_front()?;
        self.bytes -= bytes;
        Some(delta)
    }

    /// True where a reader finds something: a delta, or the end.
    pub(crate) fn is_ready(&self) -> bool {
        !self.deltas.is_empty() || self.end.is_some()
    }
}

#[derive(Debug)]
pub(crate) struct Exchange {
    pub id: String,
    pub kind: Kind,
    answers: Mutex<Answers>,
    changed: Condvar,
}

impl Exchange {
    pub(crate) fn new(id: String, kind: Kind) -> Self {
        Self {
            id,
            kind,
            answers: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn accept(&self, accepted: Accepted) {
        self.change(|answers| {
            answers.accepted.get_or_insert(accepted);
        });
    }

    /// Keep a delta for the reader; false if more than `most` bytes would wait for it.
    pub(crate) fn push(&self, delta: Delta, bytes: usize, most: usize) -> bool {
        let bytes = bytes + std::mem::size_of::<Delta>();
        let mut fits = true;
        self.change(|answers| {
            fits = answers.abandoned || answers.bytes + bytes <= most;
            if fits && !answers.abandoned && answers.end.is_none() {
                answers.bytes += bytes;
                answers.deltas.push_back((delta, bytes));
            }
        });
        fits
    }

    /// End the request; a second end counts for nothing.
    pub(crate) fn end(&self, end: Result<End, Error>) {
        let end = match end {
            Ok(end) if end.kind() != self.kind => Err(of_another_kind()),
            end => end,
        };
        self.change(|answers| {
            answers.end.get_or_insert(end);
        });
    }

    /// Keep nothing more for a reader that has gone.
    pub(crate) fn abandon(&self) {
        let mut answers = self.answers();
        answers.abandoned = true;
        answers.waker = None;
        answers.deltas.clear();
        answers.bytes = 0;
    }

    /// Block until `ready`; the thread that receives ends every request, at the latest by its own
    /// end.
    pub(crate) fn wait(&self, ready: impl Fn(&Answers) -> bool) -> MutexGuard<'_, Answers> {
        self.changed
            .wait_while(self.answers(), |answers| !ready(answers))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Wake the task when `ready` may have become true.
    pub(crate) fn poll(
        &self,
        context: &mut Context<'_>,
        ready: impl Fn(&Answers) -> bool,
    ) -> Poll<MutexGuard<'_, Answers>> {
        let mut answers = self.answers();
        if ready(&answers) {
            return Poll::Ready(answers);
        }
        answers.waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn change(&self, change: impl FnOnce(&mut Answers)) {
        let mut answers = self.answers();
        change(&mut answers);
        let waker = answers.waker.take();
        drop(answers);
        self.changed.notify_all();
        // Without the lock: a waker may drop what holds it.
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
