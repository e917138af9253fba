//! Errors: codes of the protocol and of this client.

use std::fmt;
use std::time::Duration;

use crate::protocol::{words, Refusal, Usage};

words! {
    /// A stable name for what went wrong.
    Code {
        /// A field is missing, has a wrong type or is out of range.
        InvalidValue = "invalid_value",
        /// The server does not offer this.
        UnsupportedOption = "unsupported_option",
        /// A form of answers cannot be enforced.
        GrammarInvalid = "grammar_invalid",
        /// The prompt has no text to continue.
        PromptEmpty = "prompt_empty",
        /// The prompt has too many tokens.
        PromptTooLong = "prompt_too_long",
        /// Prompt and `max_tokens` are too many together.
        CapacityExceeded = "capacity_exceeded",
        /// No adapter has that name.
        AdapterUnknown = "adapter_unknown",
        /// Pins would take too much of the prefix cache.
        CacheFull = "cache_full",
        /// A picture cannot be read.
        ImageInvalid = "image_invalid",
        /// A picture has too many bytes or pixels.
        ImageTooLarge = "image_too_large",
        /// A picture took too long to decode.
        ImageTimeout = "image_timeout",
        /// The server could not read a message.
        BadMessage = "bad_message",
        /// A message has too many bytes.
        MessageTooLarge = "message_too_large",
        /// The server has no such message.
        UnknownMessage = "unknown_message",
        /// Another request with this id is open.
        DuplicateId = "duplicate_id",
        /// The engine died each time that it had this request.
        RepeatedFailure = "repeated_failure",
        /// The daemon has as many sessions as it takes.
        TooManyClients = "too_many_clients",
        /// This client has as many requests as it may.
        TooManyRequests = "too_many_requests",
        /// Too much waits already.
        QueueFull = "queue_full",
        /// The request's time ran out.
        DeadlineExceeded = "deadline_exceeded",
        /// The answers were not read in time.
        SlowClient = "slow_client",
        /// The daemon has heard nothing for the lease.
        LeaseExpired = "lease_expired",
        /// The daemon stops.
        ShuttingDown = "shutting_down",
        /// The engine's process died.
        ExecutorFailed = "executor_failed",
        /// The process that looks at pictures died.
        EncoderFailed = "encoder_failed",
        /// A file of the model is damaged.
        WeightsInvalid = "weights_invalid",
        /// The daemon's owner has ended the request.
        CancelledByOperator = "cancelled_by_operator",
        /// The engine computed a value that is not a number.
        NonFinite = "non_finite",
        /// The device has no memory for the request.
        OutOfMemory = "out_of_memory",
        /// A fault of the server.
        Internal = "internal",
        /// Client and server have no protocol in common.
        UnsupportedProtocol = "unsupported_protocol",
        /// The daemon's socket is for others.
        NotAllowed = "not_allowed",
        /// The server knows of no session.
        HelloRequired = "hello_required",
        /// Nobody listens at the daemon's socket.
        ConnectionRefused = "connection_refused",
        /// The daemon does not answer.
        ConnectionTimeout = "connection_timeout",
        /// The connection has ended.
        ConnectionLost = "connection_lost",
        /// The server sent what the protocol does not allow.
        ProtocolViolation = "protocol_violation",
        /// The client was closed.
        ClientClosed = "client_closed",
    }
}

/// What is to be done about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request must change.
    Request,
    /// The service could not take or finish it: try again later.
    Service,
    /// The daemon cannot be reached, or the conversation broke.
    Connection,
}

impl Code {
    /// The kind of errors with this code; one that is newer than this client is of the service.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidValue
            | Self::UnsupportedOption
            | Self::GrammarInvalid
            | Self::PromptEmpty
            | Self::PromptTooLong
            | Self::CapacityExceeded
            | Self::AdapterUnknown
            | Self::CacheFull
            | Self::ImageInvalid
            | Self::ImageTooLarge
            | Self::ImageTimeout
            | Self::BadMessage
            | Self::MessageTooLarge
            | Self::UnknownMessage
            | Self::DuplicateId
            | Self::RepeatedFailure => ErrorKind::Request,
            Self::UnsupportedProtocol
            | Self::NotAllowed
            | Self::HelloRequired
            | Self::ConnectionRefused
            | Self::ConnectionTimeout
            | Self::ConnectionLost
            | Self::ProtocolViolation
            | Self::ClientClosed => ErrorKind::Connection,
            _ => ErrorKind::Service,
        }
    }
}

/// A failure: a stable code, and one sentence for people.
#[derive(Clone, Debug, PartialEq)]
pub struct Error(Box<Failure>);

#[derive(Clone, Debug, PartialEq)]
struct Failure {
    code: Code,
    message: String,
    field: String,
    retry_after: Option<Duration>,
    usage: Option<Usage>,
}

impl Error {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self::at("", code, message)
    }

    pub(crate) fn at(field: &str, code: Code, message: impl Into<String>) -> Self {
        let (message, field) = (message.into(), field.to_owned());
        Self(Box::new(Failure {
            code,
            message,
            field,
            retry_after: None,
            usage: None,
        }))
    }

    /// The code.
    pub fn code(&self) -> &Code {
        &self.0.code
    }

    /// What is to be done about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.code.kind()
    }

    /// One sentence for people.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The field at fault, such as `messages[0].role`; empty where there is none.
    pub fn field(&self) -> &str {
        &self.0.field
    }

    /// After what time there should be room, where waiting helps.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// What a generation had taken before it failed.
    pub fn usage(&self) -> Option<&Usage> {
        self.0.usage.as_ref()
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        // The daemon knows this connection no more: for a caller it is lost.
        let code = if refusal.code == Code::HelloRequired {
            Code::ConnectionLost
        } else {
            refusal.code
        };
        let seconds = refusal.retry_after_s.unwrap_or(f64::NAN);
        Self(Box::new(Failure {
            code,
            message: refusal.message,
            field: refusal.field,
            retry_after: (0.0..1e9)
                .contains(&seconds)
                .then(|| Duration::from_secs_f64(seconds)),
            usage: refusal.usage,
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}", self.message(), self.code())?;
        if !self.field().is_empty() {
            write!(formatter, ", {}", self.field())?;
        }
        if let Some(time) = self.retry_after() {
            write!(formatter, ", again in {:.3} s", time.as_secs_f64())?;
        }
        formatter.write_str(")")
    }
}

impl std::error::Error for Error {}
