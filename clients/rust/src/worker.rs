//! The thread that owns the socket.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::io::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Code, Error};
use crate::exchange::{End, Exchange};
use crate::msgpack::{self, MAX_FRAME_BYTES};
use crate::protocol::{Done, Hello, Request};
use crate::session::{Effect, Session};

/// Requests that may wait for the thread, or for a session.
const MAX_WAITING: usize = 1024;
/// Messages taken in a row, before commands and the clock are looked at.
const BURST: usize = 256;
/// Renewals in the time of a lease: two of them may be late.
const RENEWALS: u32 = 3;
/// The shortest time between two of them in seconds, whatever lease is given.
const SHORTEST_RENEWAL_S: f64 = 0.01;
const RECONNECT_MS: i32 = 20;
const RECONNECT_MAX_MS: i32 = 200;
const FAREWELL_MS: i32 = 100;

/// What callers ask of the thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Open a session if there is none.
    Open(Arc<Exchange>),
    /// Send a request and the frames of its pictures.
    Send(Waiting),
    /// End a generation.
    Cancel(String),
}

/// A request that is to be sent.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub exchange: Arc<Exchange>,
    pub message: Vec<u8>,
    pub frames: Vec<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Queue {
    commands: VecDeque<Command>,
    is_closed: bool,
}

/// The way to the thread, for any others.
#[derive(Debug)]
pub(crate) struct Mailbox {
    queue: Mutex<Queue>,
    wake: UnixStream,
}

impl Mailbox {
    /// Tell the thread; a request that it cannot take ends at once.
    pub(crate) fn tell(&self, command: Command) {
        let mut queue = self.queue();
        let error = if queue.is_closed {
            closed()
        } else if queue.commands.len() >= MAX_WAITING && !matches!(command, Command::Cancel(_)) {
            crowded()
        } else {
            queue.commands.push_back(command);
            drop(queue);
            return self.wake();
        };
        drop(queue);
        match command {
            Command::Open(exchange) | Command::Send(Waiting { exchange, .. }) => {
                exchange.end(Err(error));
            }
            Command::Cancel(_) => {}
        }
    }

    pub(crate) fn close(&self) {
        self.queue().is_closed = true;
        self.wake();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full pipe wakes the thread as well.
        let _ = (&self.wake).write(&[0]);
    }
}

fn crowded() -> Error {
    let text = format!("{MAX_WAITING} requests wait for the connection already");
    Error::new(Code::TooManyRequests, text)
}

fn closed() -> Error {
    Error::new(
        Code::ClientClosed,
        "this client was closed: make another one",
    )
}

/// Time by which silence of the daemon is judged: of the time between two readings `most` counts,
/// so that a process that was stopped does not take its own pause for the daemon's.
#[derive(Debug)]
struct RunningClock {
    most: Duration,
    seen: Instant,
    now: Duration,
}

impl RunningClock {
    fn now(&mut self) -> Duration {
        let seen = Instant::now();
        self.now += (seen - self.seen).min(self.most);
        self.seen = seen;
        self.now
    }
}

/// A connected DEALER, and the events of its disconnection.
struct Link {
    socket: zmq::Socket,
    monitor: zmq::Socket,
    /// The connection has ended, and what came before is still to be read.
    has_ended: bool,
}

impl Link {
    fn open(address: &str) -> Result<Self, zmq::Error> {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER)?;
        socket.set_linger(0)?;
        socket.set_maxmsgsize(MAX_FRAME_BYTES)?;
        socket.set_reconnect_ivl(RECONNECT_MS)?;
        socket.set_reconnect_ivl_max(RECONNECT_MAX_MS)?;
        socket.monitor("inproc://events", zmq::SocketEvent::DISCONNECTED as i32)?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect("inproc://events")?;
        socket.connect(address)?;
        Ok(Self {
            socket,
            monitor,
            has_ended: false,
        })
    }

    fn send(&self, message: Vec<u8>, frames: Vec<Vec<u8>>) -> Result<(), Error> {
        let parts = std::iter::once(message)
            .chain(frames)
            .map(zmq::Message::from);
        self.socket
            .send_multipart(parts, zmq::DONTWAIT)
            .map_err(|error| match error {
                zmq::Error::EAGAIN => Error::new(
                    Code::ConnectionTimeout,
                    "the daemon does not take messages any more",
                ),
                error => Error::new(Code::ConnectionLost, format!("ZeroMQ cannot send: {error}")),
            })
    }

    /// The first frame of the next message, `None` when there is none now.
    fn receive(&self) -> Result<Option<zmq::Message>, zmq::Error> {
        match self.socket.recv_msg(zmq::DONTWAIT) {
            Ok(frame) => {
                while self.socket.get_rcvmore()? {
                    self.socket.recv_msg(zmq::DONTWAIT)?;
                }
                Ok(Some(frame))
            }
            Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn disconnected(&self) -> bool {
        self.monitor.recv_multipart(zmq::DONTWAIT).is_ok()
    }
}

/// How a worker goes about its connection.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub address: String,
    pub timeout: Duration,
    pub silence: Duration,
    pub buffer_bytes: usize,
    pub hello: Hello,
}

/// The thread's own state.
pub(crate) struct Worker {
    settings: Settings,
    mailbox: Arc<Mailbox>,
    wake: UnixStream,
    clock: RunningClock,
    session: Session,
    link: Option<Link>,
    /// Those who wait for a session to be opened, and requests that do.
    opening: Vec<Arc<Exchange>>,
    waiting: VecDeque<Waiting>,
    /// Until when a daemon that is not there is waited for, as it may be restarted.
    awaited_until: Duration,
    /// When opening the session fails, while it is opened.
    limit: Duration,
    heard: Duration,
    renew_at: Duration,
}

impl Worker {
    /// A worker without a session, and the way to it.
    pub(crate) fn new(settings: Settings) -> std::io::Result<(Self, Arc<Mailbox>)> {
        let (wake, own) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        own.set_nonblocking(true)?;
        let mailbox = Arc::new(Mailbox {
            queue: Mutex::default(),
            wake,
        });
        let clock = RunningClock {
            most: settings.silence / RENEWALS,
            seen: Instant::now(),
            now: Duration::ZERO,
        };
        let worker = Self {
            mailbox: Arc::clone(&mailbox),
            wake: own,
            clock,
            session: Session::new(settings.hello.clone(), settings.buffer_bytes),
            link: None,
            opening: Vec::new(),
            waiting: VecDeque::new(),
            awaited_until: Duration::ZERO,
            limit: Duration::ZERO,
            heard: Duration::ZERO,
            renew_at: Duration::ZERO,
            settings,
        };
        Ok((worker, mailbox))
    }

    /// Serve the mailbox until it is closed.
    pub(crate) fn run(mut self) {
        while self.commands() {
            self.receive();
            self.keep_time();
            self.wait();
        }
    }

    /// Take what callers have asked; false if the client was closed.
    fn commands(&mut self) -> bool {
        let mut bytes = [0; 64];
        while matches!((&self.wake).read(&mut bytes), Ok(count) if count == bytes.len()) {}
        let mailbox = Arc::clone(&self.mailbox);
        loop {
            let command = {
                let mut queue = mailbox.queue();
                if queue.is_closed {
                    return false;
                }
                queue.commands.pop_front()
            };
            match command {
                None => return true,
                Some(Command::Open(exchange)) => match self.session.welcome() {
                    Some(welcome) => exchange.end(Ok(End::Welcome(Box::new(welcome.clone())))),
                    None if self.opening.len() >= MAX_WAITING => exchange.end(Err(crowded())),
                    None => {
                        self.opening.push(exchange);
                        self.open();
                    }
                },
                Some(Command::Send(request)) if self.session.welcome().is_some() => {
                    self.send(request);
                }
                Some(Command::Send(request)) => self.postpone(request),
                Some(Command::Cancel(id)) => self.cancel(id),
            }
        }
    }

    fn postpone(&mut self, request: Waiting) {
        if self.waiting.len() >= MAX_WAITING {
            request.exchange.end(Err(crowded()));
            return;
        }
        self.waiting.push_back(request);
        self.open();
    }

    /// Begin a session, unless that has begun.
    fn open(&mut self) {
        if self.link.is_some() {
            return;
        }
        if let Err(error) = self.reachable() {
            return self.lose(&error);
        }
        match Link::open(&self.settings.address) {
            Ok(link) => self.link = Some(link),
            Err(error) => {
                let text = format!("ZeroMQ cannot open a socket: {error}");
                return self.lose(&Error::new(Code::ConnectionRefused, text));
            }
        }
        self.limit = self.clock.now().saturating_add(self.settings.timeout);
        self.session = Session::new(self.settings.hello.clone(), self.settings.buffer_bytes);
        self.tell(&self.session.hello());
    }

    /// Fail where nobody listens, unless that is to be waited for.
    fn reachable(&mut self) -> Result<(), Error> {
        let now = self.clock.now();
        match probe(&self.settings.address) {
            Err(error) if error.code() != &Code::ConnectionRefused => Err(error),
            Err(error) if now >= self.awaited_until => Err(error),
            _ => Ok(()),
        }
    }

    fn send(&mut self, request: Waiting) {
        let Waiting {
            exchange,
            message,
            frames,
        } = request;
        if let Err(error) = self.session.check(&message, &frames) {
            return exchange.end(Err(error));
        }
        self.session.add(exchange);
        self.post(message, frames);
    }

    fn cancel(&mut self, id: String) {
        if self.session.is_open(&id) {
            self.tell(&Request::Cancel { id });
        } else if let Some(place) = self.waiting.iter().position(|one| one.exchange.id == id) {
            if let Some(request) = self.waiting.remove(place) {
                request
                    .exchange
                    .end(Ok(End::Done(Box::new(Done::unsent(id)))));
            }
        }
    }

    fn tell(&mut self, message: &Request) {
        match msgpack::encode(message) {
            Ok(message) => self.post(message, Vec::new()),
            Err(error) => self.lose(&error),
        }
    }

    fn post(&mut self, message: Vec<u8>, frames: Vec<Vec<u8>>) {
        if let Some(Err(error)) = self.link.as_ref().map(|link| link.send(message, frames)) {
            self.lose(&error);
        } else {
            // Every message renews the lease.
            self.renew_at = self.clock.now() + self.renewal();
        }
    }

    fn renewal(&self) -> Duration {
        let lease_s = self
            .session
            .welcome()
            .map_or(f64::INFINITY, |one| one.limits.lease_s);
        let silence_s = self.settings.silence.as_secs_f64();
        let renewal_s = lease_s.min(silence_s) / f64::from(RENEWALS);
        Duration::from_secs_f64(renewal_s.max(SHORTEST_RENEWAL_S))
    }

    fn receive(&mut self) {
        // Looked at before: what came ahead of the end is then read ahead of it.
        if let Some(link) = &mut self.link {
            link.has_ended = link.has_ended || link.disconnected();
        }
        for _ in 0..BURST {
            let received = match &self.link {
                Some(link) => link.receive(),
                None => return,
            };
            let frame = match received {
                Ok(Some(frame)) => frame,
                Ok(None) => return self.take_end(),
                Err(error) => {
                    let text = format!("ZeroMQ cannot receive: {error}");
                    return self.lose(&Error::new(Code::ConnectionLost, text));
                }
            };
            self.heard = self.clock.now();
            match self.session.receive(&frame) {
                Effect::Nothing => {}
                Effect::Opened => self.opened(),
                Effect::Send(message) => self.tell(&message),
                Effect::Lost(error) => return self.lose(&error),
            }
        }
    }

    /// Act on the end of the connection, behind the last message that came on it.
    fn take_end(&mut self) {
        let has_ended = self.link.as_mut().map(|link| &mut link.has_ended);
        if !has_ended.map_or(false, std::mem::take) {
            return;
        }
        if self.session.welcome().is_none() {
            // Whoever listened is gone and cannot have kept the first hello.
            if let Err(error) = self.reachable() {
                return self.lose(&error);
            }
            self.tell(&self.session.hello());
        } else {
            self.lose(&Error::new(
                Code::ConnectionLost,
                "the connection to the daemon has ended",
            ));
        }
    }

    fn opened(&mut self) {
        self.renew_at = self.clock.now() + self.renewal();
        if let Some(welcome) = self.session.welcome() {
            for exchange in self.opening.drain(..) {
                exchange.end(Ok(End::Welcome(Box::new(welcome.clone()))));
            }
        }
        for request in std::mem::take(&mut self.waiting) {
            if self.link.is_some() {
                self.send(request);
            } else {
                self.postpone(request);
            }
        }
    }

    fn keep_time(&mut self) {
        let now = self.clock.now();
        if self.link.is_none() {
            return;
        }
        if self.session.welcome().is_none() {
            if now >= self.limit {
                let error = probe(&self.settings.address)
                    .err()
                    .unwrap_or_else(|| self.silent());
                self.lose(&error);
            }
        } else if now >= self.silent_at() {
            self.lose(&self.silent());
        } else if now >= self.renew_at {
            self.tell(&Request::Lease);
        }
    }

    /// When silence counts as a loss; programs may give times without end.
    fn silent_at(&self) -> Duration {
        self.heard.saturating_add(self.settings.silence)
    }

    fn silent(&self) -> Error {
        let text = format!("no answer from a daemon at {}", self.settings.address);
        Error::new(Code::ConnectionTimeout, text)
    }

    fn wait(&mut self) {
        let mut items = vec![zmq::PollItem::from_fd(self.wake.as_raw_fd(), zmq::POLLIN)];
        let mut timeout_ms = -1;
        if let Some(link) = &self.link {
            items.push(link.socket.as_poll_item(zmq::POLLIN));
            items.push(link.monitor.as_poll_item(zmq::POLLIN));
            let due = match self.session.welcome() {
                Some(_) => self.renew_at.min(self.silent_at()),
                None => self.limit,
            };
            let left = due.saturating_sub(self.clock.now()).min(self.clock.most);
            timeout_ms = i64::try_from(left.as_millis())
                .unwrap_or(i64::MAX)
                .saturating_add(1);
        }
        // A signal ends the wait early, which does no harm.
        let _ = zmq::poll(&mut items, timeout_ms);
    }

    /// End the session, all open requests and those who wait for one.
    fn lose(&mut self, error: &Error) {
        if self.session.welcome().is_some() {
            self.awaited_until = self.clock.now().saturating_add(self.settings.timeout);
        }
        self.link = None;
        self.session.lose(error);
        let waiting = self.waiting.drain(..).map(|request| request.exchange);
        for exchange in self.opening.drain(..).chain(waiting) {
            exchange.end(Err(error.clone()));
        }
    }
}

impl Drop for Worker {
    /// Leave nobody waiting, also where the thread failed.
    fn drop(&mut self) {
        let commands = {
            let mut queue = self.mailbox.queue();
            queue.is_closed = true;
            std::mem::take(&mut queue.commands)
        };
        for command in commands {
            self.mailbox.tell(command);
        }
        if let (Some(link), Ok(bye)) = (&self.link, msgpack::encode(&Request::Bye)) {
            let _ = link.socket.set_linger(FAREWELL_MS);
            let _ = link.send(bye, Vec::new());
        }
        self.lose(&closed());
    }
}

/// Refuse an address where nobody listens, or that is for others; ZeroMQ would try for ever.
///
/// A datagram socket cannot connect to one of streams, and says in which way without ever waiting
/// for it.
fn probe(address: &str) -> Result<(), Error> {
    let path = address.trim_start_matches("ipc://");
    let refused = match UnixDatagram::unbound().and_then(|socket| socket.connect(path)) {
        Err(error) => error,
        Ok(()) => return Ok(()),
    };
    match refused.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            let text = format!("no daemon listens at {path}: start one with `hearth serve`");
            Err(Error::new(Code::ConnectionRefused, text))
        }
        ErrorKind::PermissionDenied => {
            let text = format!("not allowed to use {path}: join the group that owns it");
            Err(Error::new(Code::NotAllowed, text))
        }
        _ => Ok(()),
    }
}
