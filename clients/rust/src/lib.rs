#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]
// A field of a later protocol may be a number that is no Eq.
#![allow(clippy::derive_partial_eq_without_eq)]

mod client;
mod error;
mod exchange;
mod msgpack;
mod protocol;
mod reply;
mod session;
mod worker;

pub use client::{Canceller, Client, Deltas, Generation, Options, Outcome, Pending};
pub use error::{Code, Error, ErrorKind};
pub use protocol::{
    Accepted, Cache, CallPiece, Content, Delta, Done, Encoding, Ended, FileFormat, Generate, Image,
    ImageUsage, Limits, Message, Part, Reason, ResponseFormat, Role, Speculation, State,
    StatusReport, TokenId, TokenLogprob, Tokenize, Tool, ToolCall, ToolChoice, Usage, Welcome,
};
pub use reply::Reply;
