//! Messages of protocol 1, as maps with text keys and the tag `t`.
//!
//! `clients/PROTOCOL.md` is the specification. Requests refuse fields that they do not have,
//! answers ignore them.

mod answer;
mod conversation;
mod request;

pub use answer::*;
pub use conversation::*;
pub use request::*;

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

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
