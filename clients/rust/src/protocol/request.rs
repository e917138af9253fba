//! Messages from client to server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::conversation::take_frames;
use super::{is_default, Message, TokenId, Tool};

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
            $(
                $(#[$input_doc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $input: Option<$input_type>,
            )*
            $(
                $(#[$value_doc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $value: Option<$value_type>,
            )*
            $(
                $(#[$text_doc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $text: Option<String>,
            )*
            $(
                $(#[$list_doc])*
                #[serde(skip_serializing_if = "Vec::is_empty")]
                pub $list: Vec<$item>,
            )*
            /// Variables of the chat template by name: true or false, numbers, null or text.
            #[serde(skip_serializing_if = "BTreeMap::is_empty")]
            pub template: BTreeMap<String, Value>,
        }

        impl $name {
            /// Ask about a conversation.
            pub fn chat(messages: impl IntoIterator<Item = Message>) -> Self {
                Self { messages: Some(messages.into_iter().collect()), ..Self::default() }
            }

            $(
                $(#[$value_doc])*
                #[must_use]
                pub fn $value(mut self, $value: $value_type) -> Self {
                    self.$value = Some($value);
                    self
                }
            )*

            $(
                $(#[$text_doc])*
                #[must_use]
                pub fn $text(mut self, $text: impl Into<String>) -> Self {
                    self.$text = Some($text.into());
                    self
                }
            )*

            $(
                $(#[$list_doc])*
                #[must_use]
                pub fn $list(mut self, $list: impl IntoIterator<Item = impl Into<$item>>) -> Self {
                    self.$list = $list.into_iter().map(Into::into).collect();
                    self
                }
            )*

            /// Set a variable of the chat template: true or false, a number, null or text.
            #[must_use]
            pub fn variable(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
                self.template.insert(name.into(), value.into());
                self
            }

            /// Take the pictures out as frames, in their order, and number them.
            pub(crate) fn take_frames(&mut self) -> Vec<Vec<u8>> {
                take_frames(self.messages.as_deref_mut().unwrap_or_default())
            }
        }
    };
}

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
    /// A request for text. What is left out has the default of PROTOCOL.md; the daemon checks
    /// ranges and names the field at fault.
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
