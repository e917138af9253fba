//! The client, and what it hands out: generations and pending answers.

use std::env;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use futures_core::Stream;

use crate::error::{Code, Error};
use crate::exchange::{Answers, End, Exchange, Kind};
use crate::msgpack;
use crate::protocol::{
    Accepted, Delta, Done, Generate, Hello, Request, StatusReport, TokenId, Tokenize, Welcome,
    PROTOCOL,
};
use crate::reply::Reply;
use crate::worker::{Command, Mailbox, Settings, Waiting, Worker};

const SYSTEM_PATH: &str = "/run/hearth/hearth.sock";
/// A limit of the system.
const MAX_PATH_BYTES: usize = 107;
const FEATURES: [&str; 4] = ["reasoning", "tool_calls", "end_details", "token_bytes"];

/// How a client connects; each option has a default.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    address: Option<String>,
    timeout: Duration,
    silence: Duration,
    lease: Option<Duration>,
    name: String,
    features: Vec<String>,
    status_only: bool,
    buffer_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            address: None,
            timeout: Duration::from_secs(5),
            silence: Duration::from_secs(15),
            lease: None,
            name: String::new(),
            features: FEATURES.map(str::to_owned).into(),
            status_only: false,
            buffer_bytes: 16 << 20,
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Path of the daemon's socket, with `ipc://` before it or without; by default
    /// `$HEARTH_SOCKET`, or the agreed place.
    #[must_use]
    pub fn address(self, address: impl Into<String>) -> Self {
        Self {
            address: Some(address.into()),
            ..self
        }
    }

    /// How long to wait for the daemon's welcome; by default 5 s.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Silence of the daemon that counts as a loss; by default 15 s.
    #[must_use]
    pub fn silence(self, silence: Duration) -> Self {
        Self { silence, ..self }
    }

    /// The lease to ask for, from 1 s to an hour; by default the daemon's own.
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self {
            lease: Some(lease),
            ..self
        }
    }

    /// A name for the daemon's log, of at most 128 characters.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    /// Features of the protocol, by default all that this client reads: `reasoning`, `tool_calls`,
    /// `end_details` and `token_bytes`. `generation_defaults` is another one.
    #[must_use]
    pub fn features(self, features: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            features: features.into_iter().map(Into::into).collect(),
            ..self
        }
    }

    /// Ask for a session for `status` alone.
    #[must_use]
    pub fn status_only(self, status_only: bool) -> Self {
        Self {
            status_only,
            ..self
        }
    }

    /// Bytes of one reply that may wait for its reader, by default 16 MiB; with more it ends with
    /// `slow_client`.
    #[must_use]
    pub fn buffer_bytes(self, buffer_bytes: usize) -> Self {
        Self {
            buffer_bytes,
            ..self
        }
    }

    /// Make a client and open its session, for which this blocks.
    ///
    /// # Errors
    ///
    /// `invalid_value` for an address that cannot be one, those of connections, and what the daemon
    /// answers.
    pub fn connect(self) -> Result<Client, Error> {
        let client = self.client()?;
        client.open().wait()?;
        Ok(client)
    }

    /// Make a client, whose first request opens its session.
    ///
    /// # Errors
    ///
    /// `invalid_value` for an address that cannot be one, `out_of_memory` where the system gives no
    /// thread.
    pub fn client(self) -> Result<Client, Error> {
        let settings = Settings {
            address: resolve(self.address)?,
            timeout: self.timeout,
            silence: self.silence.max(Duration::from_millis(1)),
            buffer_bytes: self.buffer_bytes,
            hello: Hello {
                proto: vec![PROTOCOL],
                client: self.name,
                lease_s: self.lease.map(|lease| lease.as_secs_f64()),
                status_only: self.status_only,
                features: self.features,
            },
        };
        let failed = |error| {
            let text = format!("the system gives no thread for the connection: {error}");
            Error::new(Code::OutOfMemory, text)
        };
        let (worker, mailbox) = Worker::new(settings).map_err(failed)?;
        let thread = thread::Builder::new().name("hearth-client".to_owned());
        let thread = thread.spawn(move || worker.run()).map_err(failed)?;
        let thread = Mutex::new(Some(thread));
        Ok(Client(Arc::new(Handle {
            mailbox,
            thread,
            requests: AtomicU64::new(0),
        })))
    }
}

fn resolve(address: Option<String>) -> Result<String, Error> {
    let set = |name| env::var(name).ok().filter(|value| !value.is_empty());
    let named = address
        .filter(|one| !one.is_empty())
        .or_else(|| set("HEARTH_SOCKET"));
    let address = named.unwrap_or_else(|| {
        let own = set("XDG_RUNTIME_DIR").map(|folder| format!("{folder}/hearth/hearth.sock"));
        match own {
            Some(own) if Path::new(&own).exists() || !Path::new(SYSTEM_PATH).exists() => own,
            _ => SYSTEM_PATH.to_owned(),
        }
    });
    let path = address.strip_prefix("ipc://").unwrap_or(&address);
    let fault = if path.contains("://") {
        format!("{address} is not the path of a socket")
    } else if path.len() > MAX_PATH_BYTES || path.contains('\0') {
        format!("the path {path:?} is none, or has more than {MAX_PATH_BYTES} bytes")
    } else {
        return Ok(format!("ipc://{path}"));
    };
    Err(Error::at("address", Code::InvalidValue, fault))
}

struct Handle {
    mailbox: Arc<Mailbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
    requests: AtomicU64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Not joined: this may be the thread itself, where a task is dropped as it is woken.
        self.mailbox.close();
    }
}

/// A client of one daemon. Clones share its session, which any thread may use; a lost one is opened
/// anew by the next request. It closes with the last clone, generation and pending answer, or by
/// [`Client::close`].
#[derive(Clone)]
pub struct Client(Arc<Handle>);

impl Client {
    /// Open a session with the defaults of [`Options`], for which this blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Options::connect`].
    pub fn connect() -> Result<Self, Error> {
        Options::default().connect()
    }

    /// The daemon's welcome to the session that is open, or to a new one.
    pub fn open(&self) -> Pending<Welcome> {
        let exchange = self.exchange(Kind::Welcome);
        self.0.mailbox.tell(Command::Open(Arc::clone(&exchange)));
        self.pending(exchange)
    }

    /// Ask for text. Returns at once: what fails is the stream's last item.
    pub fn generate(&self, mut request: Generate) -> Generation {
        let exchange = self.exchange(Kind::Generation);
        request.id = exchange.id.clone();
        let frames = request.take_frames();
        self.send(&exchange, &Request::Generate(Box::new(request)), frames);
        Generation {
            client: self.clone(),
            exchange,
            is_over: false,
        }
    }

    /// Ask for the token ids of text or of a conversation.
    pub fn tokenize(&self, mut request: Tokenize) -> Pending<Vec<TokenId>> {
        let exchange = self.exchange(Kind::Tokens);
        request.id = exchange.id.clone();
        let frames = request.take_frames();
        self.send(&exchange, &Request::Tokenize(request), frames);
        self.pending(exchange)
    }

    /// Ask for the text of token ids.
    pub fn detokenize(&self, tokens: impl Into<Vec<TokenId>>) -> Pending<String> {
        let exchange = self.exchange(Kind::Text);
        let request = Request::Detokenize {
            id: exchange.id.clone(),
            tokens: tokens.into(),
        };
        self.send(&exchange, &request, Vec::new());
        self.pending(exchange)
    }

    /// Ask what the daemon serves and does.
    pub fn status(&self) -> Pending<StatusReport> {
        let exchange = self.exchange(Kind::Status);
        self.send(
            &exchange,
            &Request::Status {
                id: exchange.id.clone(),
            },
            Vec::new(),
        );
        self.pending(exchange)
    }

    /// End the session for all clones; open requests end with `client_closed`. Blocks for a tenth
    /// of a second at most.
    pub fn close(&self) {
        self.0.mailbox.close();
        let thread = self
            .0
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A thread that failed has ended its requests too.
            let _ = thread.join();
        }
    }

    fn exchange(&self, kind: Kind) -> Arc<Exchange> {
        let number = self.0.requests.fetch_add(1, Ordering::Relaxed) + 1;
        Arc::new(Exchange::new(number.to_string(), kind))
    }

    fn send(&self, exchange: &Arc<Exchange>, request: &Request, frames: Vec<Vec<u8>>) {
        let exchange = Arc::clone(exchange);
        match msgpack::encode(request) {
            Ok(message) => self.0.mailbox.tell(Command::Send(Waiting {
                exchange,
                message,
                frames,
            })),
            Err(error) => exchange.end(Err(error)),
        }
    }

    fn pending<T>(&self, exchange: Arc<Exchange>) -> Pending<T> {
        Pending {
            _client: self.clone(),
            exchange,
            result: PhantomData,
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Client").finish_non_exhaustive()
    }
}

/// An answer that is to come: a future, and [`Pending::wait`] for programs without an executor.
#[derive(Debug)]
#[must_use = "an answer is to be waited for"]
pub struct Pending<T> {
    _client: Client,
    exchange: Arc<Exchange>,
    result: PhantomData<fn() -> T>,
}

impl<T: Outcome> Pending<T> {
    /// Block until the answer comes.
    ///
    /// # Errors
    ///
    /// What the daemon answers, and those of the connection.
    pub fn wait(self) -> Result<T, Error> {
        T::of(&self.exchange.wait(|answers| answers.end.is_some()))
    }
}

impl<T: Outcome> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = self.exchange.poll(context, |answers| answers.end.is_some());
        ended.map(|answers| T::of(&answers))
    }
}

/// What a pending answer can be.
pub trait Outcome: sealed::Of {}

mod sealed {
    use super::{Answers, Error};

    pub trait Of: Sized {
        fn of(answers: &Answers) -> Result<Self, Error>;
    }
}

macro_rules! outcomes {
    ($($type:ty: $end:pat => $value:expr,)*) => {
        $(
            impl Outcome for $type {}

            impl sealed::Of for $type {
                fn of(answers: &Answers) -> Result<Self, Error> {
                    match answers.end.clone() {
                        Some(Ok($end)) => Ok($value),
                        Some(Err(error)) => Err(error),
                        // Exchange::end lets no other kind in.
                        _ => Err(Error::new(Code::ProtocolViolation, "the request has no answer")),
                    }
                }
            }
        )*
    };
}

outcomes! {
    Welcome: End::Welcome(welcome) => *welcome,
    Done: End::Done(done) => *done,
    Vec<TokenId>: End::Tokens(tokens) => tokens,
    String: End::Text(text) => text,
    StatusReport: End::Status(report) => *report,
}

/// A reply as it comes: a [`Stream`], and an iterator that blocks by `for delta in &mut
/// generation`. Both end after the last delta, or after an error. Dropped before its end it is
/// cancelled.
#[derive(Debug)]
#[must_use = "a generation that is dropped is cancelled"]
pub struct Generation {
    client: Client,
    exchange: Arc<Exchange>,
    is_over: bool,
}

impl Generation {
    /// Notice that the request is queued, once it has come.
    pub fn accepted(&self) -> Option<Accepted> {
        self.exchange.answers().accepted.clone()
    }

    /// Block until the request is queued; `None` if it has failed, which the stream tells.
    pub fn wait_accepted(&self) -> Option<Accepted> {
        let answers = self
            .exchange
            .wait(|one| one.accepted.is_some() || one.is_ready());
        answers.accepted.clone()
    }

    /// Reason and usage; `None` before the end, and after a failure.
    pub fn done(&self) -> Option<Done> {
        <Done as sealed::Of>::of(&self.exchange.answers()).ok()
    }

    /// Block until the end, and put what has not been read yet together.
    ///
    /// # Errors
    ///
    /// What the daemon answers, and those of the connection.
    pub fn wait(mut self) -> Result<Reply, Error> {
        let mut reply = Reply::default();
        for delta in &mut self {
            reply.add(&delta?);
        }
        reply.done = self.done();
        Ok(reply)
    }

    /// Ask the daemon to end it: the stream then ends with the reason `cancelled`.
    pub fn cancel(&self) {
        self.canceller().cancel();
    }

    /// A handle that cancels from elsewhere.
    pub fn canceller(&self) -> Canceller {
        let (mailbox, exchange) = (
            Arc::clone(&self.client.0.mailbox),
            Arc::clone(&self.exchange),
        );
        Canceller { mailbox, exchange }
    }

    fn take(answers: &mut Answers, is_over: &mut bool) -> Option<Result<Delta, Error>> {
        if let Some(delta) = answers.pop() {
            return Some(Ok(delta));
        }
        match &answers.end {
            Some(Err(error)) if !*is_over => {
                *is_over = true;
                Some(Err(error.clone()))
            }
            _ => None,
        }
    }
}

impl Stream for Generation {
    type Item = Result<Delta, Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let ready = this.exchange.poll(context, Answers::is_ready);
        ready.map(|mut answers| Self::take(&mut answers, &mut this.is_over))
    }
}

/// Deltas of a reply; `next` blocks.
#[derive(Debug)]
pub struct Deltas<'a>(&'a mut Generation);

impl Iterator for Deltas<'_> {
    type Item = Result<Delta, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut answers = self.0.exchange.wait(Answers::is_ready);
        Generation::take(&mut answers, &mut self.0.is_over)
    }
}

impl<'a> IntoIterator for &'a mut Generation {
    type Item = Result<Delta, Error>;
    type IntoIter = Deltas<'a>;

    fn into_iter(self) -> Deltas<'a> {
        Deltas(self)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.exchange.abandon();
        self.cancel();
    }
}

/// A handle that cancels a generation, from any thread.
#[derive(Clone, Debug)]
pub struct Canceller {
    mailbox: Arc<Mailbox>,
    exchange: Arc<Exchange>,
}

impl Canceller {
    /// Ask the daemon to end the generation; does nothing when it has ended.
    pub fn cancel(&self) {
        if self.exchange.answers().end.is_none() {
            self.mailbox.tell(Command::Cancel(self.exchange.id.clone()));
        }
    }
}
