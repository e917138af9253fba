//! Messages from server to client.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use serde_json::{Map, Value};

use super::{is_default, words, TokenId};
use crate::error::Code;

/// A message from server to client.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub(crate) enum Answer {
    Welcome(Box<Welcome>),
    Leased {
        seconds: f64,
    },
    Accepted(Accepted),
    Delta(Delta),
    Done(Box<Done>),
    Error(Refusal),
    Tokens {
        id: String,
        tokens: Vec<TokenId>,
    },
    Text {
        id: String,
        text: String,
    },
    StatusReport(Box<StatusReport>),
    /// An answer of a kind that only newer servers have.
    #[serde(other)]
    Unknown,
}

/// The answer to the first message of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Welcome {
    /// The protocol that is spoken.
    pub proto: u64,
    /// The server's name and version.
    pub server: String,
    /// What the server takes.
    pub limits: Limits,
    /// What this server offers, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// The model's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub model: String,
    /// The name of this run of the server.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub epoch: String,
    /// Names that a request's `adapter` may have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<String>,
    /// The form in which this model calls tools.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tool_format: String,
}

/// Limits of the server: sizes in bytes, lengths in tokens. Those of pictures are 0 where the model
/// sees none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a message without its pictures.
    pub frame_bytes: u64,
    /// Frames of one message.
    pub frames: u64,
    /// Requests of one client that may be open at once.
    pub requests_per_client: u64,
    /// Tokens of one prompt.
    pub prompt_tokens: u64,
    /// Tokens of prompt and reply together.
    pub total_tokens: u64,
    /// Requests that may wait.
    pub queued_requests: u64,
    /// Tokens of prompts that may wait.
    pub queued_tokens: u64,
    /// Seconds of this session's lease.
    pub lease_s: f64,
    /// Pictures of one request.
    #[serde(default, skip_serializing_if = "is_default")]
    pub images: u64,
    /// Bytes of one picture.
    #[serde(default, skip_serializing_if = "is_default")]
    pub image_bytes: u64,
    /// Bytes of all pictures of one request.
    #[serde(default, skip_serializing_if = "is_default")]
    pub request_image_bytes: u64,
    /// Tokens of one picture.
    #[serde(default, skip_serializing_if = "is_default")]
    pub image_tokens: u64,
}

/// Notice that a generation is in the queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Accepted {
    pub(crate) id: String,
    /// The prompt's length with the template.
    pub prompt_tokens: u64,
    /// The request's id in the daemon's logs and traces.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub request: String,
}

/// More of a reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Delta {
    pub(crate) id: String,
    /// Counts 0, 1, 2 and so on.
    pub seq: i64,
    /// More of the answer; may be empty.
    pub text: String,
    /// Tokens since the last delta.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<TokenId>,
    /// Log probabilities of each of `tokens`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprob>,
    /// When the step of the last token ended, in seconds of `CLOCK_MONOTONIC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<f64>,
    /// More of the model's reasoning.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// More of calls of tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallPiece>,
    /// Which of several replies this is of.
    #[serde(default, skip_serializing_if = "is_default")]
    pub choice: u64,
}

/// Log probabilities of one token and its most likely alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TokenLogprob {
    /// That of the token.
    pub logprob: f64,
    /// Alternatives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(TokenId, f64)>,
    /// The token's bytes, with the feature `token_bytes`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub token_bytes: ByteBuf,
    /// Bytes of each alternative.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top_bytes: Vec<ByteBuf>,
}

/// More of a call: id and name in its first piece, then pieces of JSON text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CallPiece {
    /// Which call of this reply it is, from 0.
    pub index: u64,
    /// The call's id.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// The tool's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// More of the arguments as JSON text.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arguments: String,
}

words! {
    /// Why a reply has ended.
    Reason {
        /// An end token or a stop string.
        Stop = "stop",
        /// `max_tokens`, or no room for more.
        Length = "length",
        /// Cancelled by the client.
        Cancelled = "cancelled",
        /// The model calls tools.
        ToolCalls = "tool_calls",
    }
}

words! {
    /// State of the daemon.
    State {
        /// It starts.
        Starting = "starting",
        /// It loads its engine.
        Loading = "loading",
        /// It serves.
        Ready = "ready",
        /// It ends what is open and takes nothing new.
        Draining = "draining",
        /// Its engine cannot be served.
        Failed = "failed",
    }
}

/// Tokens and times of a reply, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the reply, of reasoning and calls too.
    pub completion_tokens: u64,
    /// Tokens of the reply that are reasoning.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reasoning_tokens: u64,
    /// Tokens of the prompt that came from the prefix cache.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cached_tokens: u64,
    /// Until the request got a place.
    #[serde(default, skip_serializing_if = "is_default")]
    pub queue_ms: f64,
    /// From there to its first token.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prefill_ms: f64,
    /// From there to its last token.
    #[serde(default, skip_serializing_if = "is_default")]
    pub decode_ms: f64,
}

/// End of a reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Done {
    pub(crate) id: String,
    /// Why it has ended.
    pub reason: Reason,
    /// What it took.
    pub usage: Usage,
    /// Rounds of speculation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
    /// Pictures of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageUsage>,
    /// The stop string that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<String>,
    /// The end of each of several replies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Ended>,
}

impl Done {
    /// The end of a generation that was cancelled before it was sent.
    pub(crate) fn unsent(id: String) -> Self {
        let (reason, usage) = (Reason::Cancelled, Usage::default());
        Self {
            id,
            reason,
            usage,
            speculation: None,
            images: None,
            stop: None,
            choices: Vec::new(),
        }
    }
}

/// Rounds of speculation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Speculation {
    /// Rounds of a reply.
    pub rounds: u64,
    /// Tokens proposed.
    pub drafted: u64,
    /// Tokens that came from rounds.
    pub accepted: u64,
    /// Tokens a round.
    pub accept_length: f64,
}

/// Pictures of a request, and the times that they took in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ImageUsage {
    /// Images and videos.
    pub count: u64,
    /// Tokens of the prompt that they are.
    pub tokens: u64,
    /// How many of them were known from before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cached: u64,
    /// Width and height of each as the model saw it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<(u64, u64)>,
    /// Decoding.
    #[serde(default, skip_serializing_if = "is_default")]
    pub decode_ms: f64,
    /// Scaling.
    #[serde(default, skip_serializing_if = "is_default")]
    pub resize_ms: f64,
    /// The vision tower.
    #[serde(default, skip_serializing_if = "is_default")]
    pub engine_ms: f64,
}

/// End of one of several replies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Ended {
    /// Why it has ended.
    pub reason: Reason,
    /// Its tokens.
    pub completion_tokens: u64,
    /// The stop string that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<String>,
}

/// An `error` as it comes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub code: Code,
    pub message: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub field: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// State of the daemon: what it serves and does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StatusReport {
    pub(crate) id: String,
    /// The server's name and version.
    pub server: String,
    /// The model's name.
    pub model: String,
    /// State of the daemon.
    pub state: State,
    /// The stage while it loads.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stage: String,
    /// Share of the stage that is done, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Why it is in this state.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Seconds since the start.
    pub uptime_s: f64,
    /// Sessions now.
    pub clients: u64,
    /// Generations in the running batch.
    pub running: u64,
    /// Generations that wait.
    pub queued: u64,
    /// Tokens of their prompts.
    pub queued_tokens: u64,
    /// Generations that can run together.
    #[serde(default, skip_serializing_if = "is_default")]
    pub places: u64,
    /// Counters since the start.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub totals: BTreeMap<String, i64>,
    /// Facts about the engine: text and numbers by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub engine: BTreeMap<String, Value>,
    /// Adapters that requests may ask for now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<String>,
    /// Figures of the engine's process, by name as PROTOCOL.md has them.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub executor: Map<String, Value>,
}
