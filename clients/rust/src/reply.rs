//! A reply put together from its deltas.

use std::collections::BTreeMap;

use crate::protocol::{Content, Delta, Done, Message, Role, TokenId, ToolCall};

/// A reply so far. Of several replies to one request it is the first.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Reply {
    /// The answer.
    pub text: String,
    /// The model's reasoning before it.
    pub reasoning: String,
    /// Token ids.
    pub tokens: Vec<TokenId>,
    /// Reason and usage; `None` before the end.
    pub done: Option<Done>,
    calls: BTreeMap<u64, Call>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

impl Reply {
    /// Take in a delta.
    pub fn add(&mut self, delta: &Delta) {
        if delta.choice != 0 {
            return;
        }
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        self.tokens.extend(&delta.tokens);
        for piece in &delta.tool_calls {
            let call = self.calls.entry(piece.index).or_default();
            call.id.push_str(&piece.id);
            call.name.push_str(&piece.name);
            call.arguments.push_str(&piece.arguments);
        }
    }

    /// The calls that are whole, in their order: a reply may have been cut within the last one.
    pub fn tool_calls(&self) -> Vec<ToolCall> {
        let whole = |call: &Call| {
            let arguments = serde_json::from_str(&call.arguments).ok()?;
            Some(ToolCall {
                id: call.id.clone(),
                name: call.name.clone(),
                arguments,
            })
        };
        self.calls.values().filter_map(whole).collect()
    }

    /// The turn that this reply is in a conversation; `None` without text and whole calls, which no
    /// daemon takes.
    pub fn message(&self) -> Option<Message> {
        let tool_calls = self.tool_calls();
        let content = (!self.text.is_empty()).then(|| Content::Text(self.text.clone()));
        if content.is_none() && tool_calls.is_empty() {
            return None;
        }
        let reasoning = self.reasoning.clone();
        let (tool_call_id, name) = (None, None);
        Some(Message {
            role: Role::Assistant,
            content,
            reasoning,
            tool_calls,
            tool_call_id,
            name,
        })
    }
}
