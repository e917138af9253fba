//! The conversation with a daemon, apart from any I/O: frames in, answered requests out.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Code, Error};
use crate::exchange::{of_another_kind, End, Exchange, Kind};
use crate::msgpack;
use crate::protocol::{Answer, Delta, Hello, Refusal, Request, Welcome, PROTOCOL};

/// What is to be done about a frame.
#[derive(Debug)]
pub(crate) enum Effect {
    Nothing,
    /// The session is open.
    Opened,
    /// A message is to be sent.
    Send(Box<Request>),
    /// The session is lost.
    Lost(Error),
}

#[derive(Debug)]
struct Open {
    exchange: Arc<Exchange>,
    next_seq: i64,
}

/// One session: its handshake and its open requests.
#[derive(Debug)]
pub(crate) struct Session {
    hello: Hello,
    buffer_bytes: usize,
    welcome: Option<Welcome>,
    open: HashMap<String, Open>,
}

impl Session {
    pub(crate) fn new(hello: Hello, buffer_bytes: usize) -> Self {
        Self {
            hello,
            buffer_bytes,
            welcome: None,
            open: HashMap::new(),
        }
    }

    pub(crate) fn welcome(&self) -> Option<&Welcome> {
        self.welcome.as_ref()
    }

    pub(crate) fn hello(&self) -> Request {
        Request::Hello(self.hello.clone())
    }

    /// Refuse what the daemon could not attribute, or would close the connection for.
    pub(crate) fn check(&self, message: &[u8], frames: &[Vec<u8>]) -> Result<(), Error> {
        let limits = match &self.welcome {
            Some(welcome) => &welcome.limits,
            None => return Err(Error::new(Code::ConnectionLost, "there is no session")),
        };
        let exceeds = |count: usize, limit: u64| count as u64 > limit;
        if exceeds(message.len(), limits.frame_bytes) {
            let (bytes, limit) = (message.len(), limits.frame_bytes);
            let text = format!("the message has {bytes} bytes, the limit is {limit}");
            return Err(Error::new(Code::MessageTooLarge, text));
        }
        if frames.is_empty() {
            return Ok(());
        }
        let refused = |code, text: String| Err(Error::at("messages", code, text));
        if limits.images == 0 {
            let text = "the server's model takes no images".to_owned();
            return refused(Code::UnsupportedOption, text);
        }
        if exceeds(frames.len(), limits.images) {
            let (count, limit) = (frames.len(), limits.images);
            let text = format!("the request has {count} pictures, the limit is {limit}");
            return refused(Code::InvalidValue, text);
        }
        let largest = frames.iter().map(Vec::len).max().unwrap_or(0);
        if exceeds(largest, limits.image_bytes) {
            let text = format!(
                "a picture has {largest} bytes, the limit is {}",
                limits.image_bytes
            );
            return refused(Code::ImageTooLarge, text);
        }
        let all = frames.iter().map(Vec::len).sum();
        if exceeds(all, limits.request_image_bytes) {
            let limit = limits.request_image_bytes;
            let text = format!("the pictures have {all} bytes together, the limit is {limit}");
            return refused(Code::ImageTooLarge, text);
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, exchange: Arc<Exchange>) {
        self.open.insert(
            exchange.id.clone(),
            Open {
                exchange,
                next_seq: 0,
            },
        );
    }

    pub(crate) fn is_open(&self, id: &str) -> bool {
        self.open.contains_key(id)
    }

    /// Take one frame.
    pub(crate) fn receive(&mut self, frame: &[u8]) -> Effect {
        match msgpack::decode(frame) {
            Err(error) => return Effect::Lost(error),
            Ok(Answer::Welcome(welcome)) => return self.greet(*welcome),
            Ok(Answer::Error(refusal)) if refusal.id.is_empty() || ends_session(&refusal.code) => {
                return self.refuse(refusal)
            }
            Ok(Answer::Delta(delta)) => return self.delta(delta, frame.len()),
            Ok(Answer::Accepted(accepted)) => match self.open.get(&accepted.id) {
                Some(open) if open.exchange.kind == Kind::Generation => {
                    open.exchange.accept(accepted);
                }
                _ => self.end(&accepted.id.clone(), Err(of_another_kind())),
            },
            Ok(Answer::Done(done)) => self.end(&done.id.clone(), Ok(End::Done(done))),
            Ok(Answer::Error(refusal)) => self.end(&refusal.id.clone(), Err(refusal.into())),
            Ok(Answer::Tokens { id, tokens }) => self.end(&id, Ok(End::Tokens(tokens))),
            Ok(Answer::Text { id, text }) => self.end(&id, Ok(End::Text(text))),
            Ok(Answer::StatusReport(report)) => {
                self.end(&report.id.clone(), Ok(End::Status(report)));
            }
            Ok(Answer::Leased { .. } | Answer::Unknown) => {}
        }
        Effect::Nothing
    }

    /// End all open requests with `error`, and the session.
    pub(crate) fn lose(&mut self, error: &Error) {
        self.welcome = None;
        for (_, open) in self.open.drain() {
            open.exchange.end(Err(error.clone()));
        }
    }

    fn end(&mut self, id: &str, end: Result<End, Error>) {
        // What comes late, to an id that has ended, is ignored.
        if let Some(open) = self.open.remove(id) {
            open.exchange.end(end);
        }
    }

    fn greet(&mut self, welcome: Welcome) -> Effect {
        if welcome.proto != PROTOCOL {
            let text = format!(
                "the server speaks protocol {}, not {PROTOCOL}",
                welcome.proto
            );
            return Effect::Lost(Error::new(Code::UnsupportedProtocol, text));
        }
        let lease_s = welcome.limits.lease_s;
        if !lease_s.is_finite() || lease_s <= 0.0 {
            let text = format!("the server gives a lease of {lease_s} s");
            return Effect::Lost(Error::at("lease_s", Code::ProtocolViolation, text));
        }
        let known = self
            .welcome
            .as_ref()
            .map(|known| known.epoch != welcome.epoch);
        match known {
            Some(true) => {
                Effect::Lost(Error::new(Code::ConnectionLost, "the daemon was restarted"))
            }
            Some(false) => {
                self.welcome = Some(welcome);
                Effect::Nothing
            }
            None => {
                self.welcome = Some(welcome);
                Effect::Opened
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Effect {
        let refused = refusal.code == Code::UnsupportedOption && refusal.field == "features";
        match (&self.welcome, &refusal.code) {
            (None, _) if refused && !self.hello.features.is_empty() => {
                // A server of 0.1.0.
                self.hello.features.clear();
                Effect::Send(Box::new(self.hello()))
            }
            // It answered what was sent before the connection's first message.
            (None, Code::HelloRequired) => Effect::Nothing,
            (None, _) | (_, Code::NotAllowed) => Effect::Lost(refusal.into()),
            (_, code) if ends_session(code) => Effect::Lost(refusal.into()),
            _ => Effect::Nothing,
        }
    }

    fn delta(&mut self, delta: Delta, bytes: usize) -> Effect {
        let id = delta.id.clone();
        let open = match self.open.get_mut(&id) {
            Some(open) => open,
            None => return Effect::Nothing,
        };
        if open.exchange.kind != Kind::Generation {
            self.end(&id, Err(of_another_kind()));
            return Effect::Nothing;
        }
        let error = if delta.seq != open.next_seq {
            let text = format!("delta {} came where {} was due", delta.seq, open.next_seq);
            Error::at("seq", Code::ProtocolViolation, text)
        } else {
            open.next_seq += 1;
            if open.exchange.push(delta, bytes, self.buffer_bytes) {
                return Effect::Nothing;
            }
            let text = format!(
                "more than {} bytes of the reply wait for a reader",
                self.buffer_bytes
            );
            Error::new(Code::SlowClient, text)
        };
        self.end(&id, Err(error));
        Effect::Send(Box::new(Request::Cancel { id }))
    }
}

/// True for what says that there is no session any more, whichever request it is told of.
fn ends_session(code: &Code) -> bool {
    matches!(code, Code::HelloRequired | Code::LeaseExpired)
}
