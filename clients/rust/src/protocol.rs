//! Messages of protocol 1, as maps with text keys and the tag `t`.
//!
//! `clients/PROTOCOL.md` is the specification. Requests refuse fields that they do not have, answers ignore them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use serde_json::{Map, Value};

use crate::error::{Code, Error};

/// A token's id.
pub type TokenId = u64;

/// The number of this protocol.
pub(crate) const PROTOCOL: u64 = 1;

/// Defines an enum of words, in which a newer server may have others.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(from = "String", into = "String")]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $variant,)*
            /// A word that is newer than this client.
            Other(String),
        }

        impl $name {
            /// The word as it stands on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $word,)*
                    Self::Other(word) => word,
                }
            }
        }

        impl From<String> for $name {
            fn from(word: String) -> Self {
                match word.as_str() {
                    $($word => Self::$variant,)*
                    _ => Self::Other(word),
                }
            }
        }

        impl From<$name> for String {
            fn from(word: $name) -> Self {
                word.as_str().to_owned()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use words;

/// Defines a request whose fields are all optional, each with a setter.
macro_rules! request {
    (
        $(#[$meta:meta])* $name:ident
        inputs { $($(#[$input_doc:meta])* $input:ident: $input_type:ty,)* }
        values { $($(#[$value_doc:meta])* $value:ident: $value_type:ty,)* }
        texts { $($(#[$text_doc:meta])* $text:ident,)* }
        lists { $($(#[$list_doc:meta])* $list:ident: $item:ty,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            #[serde(skip_serializing_if = "String::is_empty")]
            pub(crate) id: String,
            $($(#[$input_doc])* #[serde(skip_serializing_if = "Option::is_none")] pub $input: Option<$input_type>,)*
            $($(#[$value_doc])* #[serde(skip_serializing_if = "Option::is_none")] pub $value: Option<$value_type>,)*
            $($(#[$text_doc])* #[serde(skip_serializing_if = "Option::is_none")] pub $text: Option<String>,)*
            $($(#[$list_doc])* #[serde(skip_serializing_if = "Vec::is_empty")] pub $list: Vec<$item>,)*
            /// Variables of the chat template by name: true or false, numbers, null or text.
            #[serde(skip_serializing_if = "BTreeMap::is_empty")]
            pub template: BTreeMap<String, Value>,
        }

        impl $name {
            /// Ask about a conversation.
            pub fn chat(messages: impl IntoIterator<Item = Message>) -> Self {
                Self { messages: Some(messages.into_iter().collect()), ..Self::default() }
            }

            $($(#[$value_doc])* #[must_use] pub fn $value(mut self, $value: $value_type) -> Self {
                self.$value = Some($value);
                self
            })*
            $($(#[$text_doc])* #[must_use] pub fn $text(mut self, $text: impl Into<String>) -> Self {
                self.$text = Some($text.into());
                self
            })*
            $($(#[$list_doc])* #[must_use] pub fn $list(mut self, $list: impl IntoIterator<Item = impl Into<$item>>) -> Self {
                self.$list = $list.into_iter().map(Into::into).collect();
                self
            })*

            /// Set a variable of the chat template: true or false, a number, null or text.
            #[must_use]
            pub fn variable(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
                self.template.insert(name.into(), value.into());
                self
            }

            /// Take the pictures out as frames, in their order, and number them.
            pub(crate) fn take_frames(&mut self) -> Vec<Vec<u8>> {
                let mut frames = Vec::new();
                for message in self.messages.iter_mut().flatten() {
                    if let Some(Content::Parts(parts)) = &mut message.content {
                        for image in parts.iter_mut().flat_map(Part::images) {
                            frames.push(std::mem::take(&mut image.data));
                            image.frame = frames.len();
                        }
                    }
                }
                frames
            }
        }
    };
}

// --- requests ---------------------------------------------------------------------------------

/// A message from client to server.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(Deserialize))]
#[serde(tag = "t", rename_all = "snake_case")]
pub(crate) enum Request {
    Hello(Hello),
    Generate(Box<Generate>),
    Cancel { id: String },
    Tokenize(Tokenize),
    Detokenize { id: String, tokens: Vec<TokenId> },
    Status { id: String },
    Lease,
    Bye,
}

/// The first message of a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Hello {
    pub proto: Vec<u64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub client: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_s: Option<f64>,
    #[serde(skip_serializing_if = "is_default")]
    pub status_only: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
}

request! {
    /// A request for text. What is left out has the default of PROTOCOL.md; the daemon checks ranges and names the
    /// field at fault.
    Generate
    inputs {
        /// The conversation; given by [`Generate::chat`].
        messages: Vec<Message>,
        /// Raw text to continue; given by [`Generate::prompt`].
        prompt: String,
    }
    values {
        /// Tokens to generate at most, from 1.
        max_tokens: u32,
        /// From 0 to 100; 0 always takes the most likely token.
        temperature: f64,
        /// So many most likely tokens to choose from; 0 keeps all.
        top_k: u32,
        /// The most likely tokens up to this probability, above 0 to 1.
        top_p: f64,
        /// Tokens with at least this share of the best one's probability, from 0 to 1.
        min_p: f64,
        /// From 0.01 to 100; above 1 makes tokens of prompt and reply less likely.
        repetition_penalty: f64,
        /// From -2 to 2, taken from the logit of tokens that the reply has.
        presence_penalty: f64,
        /// From -2 to 2, taken as often as the reply has the token.
        frequency_penalty: f64,
        /// From 0 to 2^63 - 1; the same seed gives the same text.
        seed: u64,
        /// From 0 to 20 alternatives to report for each token.
        logprobs: u32,
        /// Go on after an end token.
        ignore_eos: bool,
        /// From -10 to 10, higher goes first.
        priority: i32,
        /// Seconds after which the request fails.
        deadline_s: f64,
        /// Put the time of its step on every delta.
        timestamps: bool,
        /// Try several tokens a step, or never.
        speculation: bool,
        /// Use of the prefix cache.
        cache: Cache,
        /// Choice among the tools.
        tool_choice: ToolChoice,
        /// Several calls in a turn.
        parallel_tool_calls: bool,
        /// A form that the answer must have.
        response_format: ResponseFormat,
        /// Tokens of reasoning at most.
        reasoning_budget: u32,
        /// Replies to the one prompt, from 1 to 8.
        n: u32,
    }
    texts {
        /// The name of the LoRA adapter that answers.
        adapter,
        /// Text; only requests with the same one share what the prefix cache keeps.
        cache_salt,
        /// The caller's place in a trace, by W3C Trace Context.
        traceparent,
    }
    lists {
        /// Texts before which the reply ends.
        stop: String,
        /// Numbers from -100 to 100 that are added to a token's logit.
        logit_bias: (TokenId, f64),
        /// Tools that the model may call.
        tools: Tool,
    }
}

impl Generate {
    /// Ask to continue raw text.
    pub fn prompt(text: impl Into<String>) -> Self {
        Self {
            prompt: Some(text.into()),
            ..Self::default()
        }
    }
}

request! {
    /// A request for token ids.
    Tokenize
    inputs {
        /// The conversation; given by [`Tokenize::chat`].
        messages: Vec<Message>,
        /// Raw text; given by [`Tokenize::text`].
        text: String,
    }
    values {
        /// Choice among the tools.
        tool_choice: ToolChoice,
        /// Several calls in a turn.
        parallel_tool_calls: bool,
    }
    texts {}
    lists {
        /// Tools that the model may call.
        tools: Tool,
    }
}

impl Tokenize {
    /// Ask for the tokens of raw text.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            text: Some(text.into()),
            ..Self::default()
        }
    }
}

/// Use of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// Take the prompt's beginning from it, and leave it there.
    Use,
    /// Neither take nor leave anything.
    Bypass,
    /// Keep the prompt there until the session ends.
    Pin,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, for models that tell them apart.
    Developer,
    /// Who asks.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Whose turn it is.
    pub role: Role,
    /// Text, or parts; a turn with calls may do without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// The assistant's reasoning.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// The assistant's calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: Role, content: impl Into<Content>) -> Self {
        let content = Some(content.into());
        Self {
            role,
            content,
            reasoning: String::new(),
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Instructions.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new(Role::System, content)
    }

    /// A turn of the user.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(Role::User, content)
    }

    /// A turn of the model, without calls.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// The result of call `id`.
    pub fn tool(id: impl Into<String>, result: impl Into<Content>) -> Self {
        Self {
            tool_call_id: Some(id.into()),
            ..Self::new(Role::Tool, result)
        }
    }
}

/// What a turn says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Text alone.
    Text(String),
    /// Texts, pictures and videos in their order.
    Parts(Vec<Part>),
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<Part>> for Content {
    fn from(parts: Vec<Part>) -> Self {
        Self::Parts(parts)
    }
}

impl<const N: usize> From<[Part; N]> for Content {
    fn from(parts: [Part; N]) -> Self {
        Self::Parts(parts.into())
    }
}

/// A piece of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Part {
    /// Text.
    Text {
        /// The text, not empty.
        text: String,
    },
    /// A picture.
    Image(Image),
    /// A video, by [`Part::video`].
    Video {
        /// Its pictures in their order, each with a time.
        frames: Vec<Image>,
    },
}

impl Part {
    /// A video of pictures and their times in seconds.
    pub fn video(frames: impl IntoIterator<Item = (Image, f64)>) -> Self {
        let timed = |(image, time_s)| Image {
            time_s: Some(time_s),
            ..image
        };
        Self::Video {
            frames: frames.into_iter().map(timed).collect(),
        }
    }

    fn images(&mut self) -> &mut [Image] {
        match self {
            Self::Text { .. } => &mut [],
            Self::Image(image) => std::slice::from_mut(image),
            Self::Video { frames } => frames,
        }
    }
}

impl From<&str> for Part {
    fn from(text: &str) -> Self {
        Self::Text {
            text: text.to_owned(),
        }
    }
}

impl From<Image> for Part {
    fn from(image: Image) -> Self {
        Self::Image(image)
    }
}

/// A picture: a file, or raw pixels of 8 bits a value. It travels in a frame behind the message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    #[serde(skip)]
    data: Vec<u8>,
    frame: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<FileFormat>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encoding: Option<Encoding>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    width: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    height: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    step: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    time_s: Option<f64>,
}

impl Image {
    /// The bytes of a file, whose first bytes tell its format.
    ///
    /// # Errors
    ///
    /// `image_invalid` for what is no GIF, JPEG, PNG or WebP.
    pub fn file(data: impl Into<Vec<u8>>) -> Result<Self, Error> {
        let data = data.into();
        let text = "this is no JPEG, PNG, WebP or GIF file: give raw pixels their encoding";
        let format = FileFormat::of(&data).ok_or_else(|| Error::new(Code::ImageInvalid, text))?;
        Ok(Self::of_format(format, data))
    }

    /// The bytes of a file of this format.
    pub fn of_format(format: FileFormat, data: impl Into<Vec<u8>>) -> Self {
        let (data, format) = (data.into(), Some(format));
        Self {
            data,
            frame: 0,
            format,
            encoding: None,
            width: None,
            height: None,
            step: None,
            time_s: None,
        }
    }

    /// Raw pixels, row by row, without bytes between rows.
    pub fn raw(encoding: Encoding, width: u32, height: u32, data: impl Into<Vec<u8>>) -> Self {
        let (encoding, width, height) = (Some(encoding), Some(width), Some(height));
        Self {
            data: data.into(),
            frame: 0,
            format: None,
            encoding,
            width,
            height,
            step: None,
            time_s: None,
        }
    }

    /// Set the bytes from one row of raw pixels to the next.
    #[must_use]
    pub fn step(self, step: u32) -> Self {
        Self {
            step: Some(step),
            ..self
        }
    }
}

/// The format of a picture's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum FileFormat {
    Gif,
    Jpeg,
    Png,
    Webp,
}

impl FileFormat {
    fn of(data: &[u8]) -> Option<Self> {
        match data {
            [b'G', b'I', b'F', b'8', ..] => Some(Self::Gif),
            [0xff, 0xd8, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::Webp),
            _ => None,
        }
    }
}

/// The layout of raw pixels, named as ROS names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Encoding {
    #[serde(rename = "8UC1")]
    U8C1,
    #[serde(rename = "8UC3")]
    U8C3,
    #[serde(rename = "8UC4")]
    U8C4,
    BayerBggr8,
    BayerGbrg8,
    BayerGrbg8,
    BayerRggb8,
    Bgr8,
    Bgra8,
    Mono8,
    Nv12,
    Rgb8,
    Rgba8,
    Uyvy,
    Yuv422,
    #[serde(rename = "yuv422_yuy2")]
    Yuv422Yuy2,
    Yuyv,
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tool {
    /// 1 to 128 letters, digits and signs of `_` `.` `:` `/` `-`.
    pub name: String,
    /// What it does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// A JSON schema of its arguments.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub parameters: Map<String, Value>,
    /// Whether arguments follow the schema also where the model chooses by itself to call.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strict: bool,
}

impl Tool {
    /// A tool; `parameters` is a JSON schema of its arguments, an object.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        parameters: Map<String, Value>,
    ) -> Self {
        Self {
            name: name.into(),
            description: description.into(),
            parameters,
            strict: false,
        }
    }
}

/// Choice among the tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// The model's.
    Auto,
    /// No calls.
    None,
    /// One call at least.
    Required,
    /// Exactly one call, of this tool.
    #[serde(rename = "name")]
    Tool(String),
}

/// A form that the answer must have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ResponseFormat {
    /// A JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema {
        /// An object, or true or false.
        schema: Value,
    },
    /// Text that all of a regular expression matches.
    Regex {
        /// The expression.
        regex: String,
    },
    /// Text of a grammar in the notation of Lark.
    Lark {
        /// The grammar.
        grammar: String,
    },
}

/// A call of a tool by the model; its result gives the `id` again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// The call's id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Arguments by name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub arguments: Map<String, Value>,
}

// --- answers ----------------------------------------------------------------------------------

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

/// Limits of the server: sizes in bytes, lengths in tokens. Those of pictures are 0 where the model sees none.
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

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
