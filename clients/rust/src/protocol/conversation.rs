//! Conversations: turns, pictures, tools and their calls.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::is_default;
use crate::error::{Code, Error};

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

/// Take the pictures of a conversation out as frames, in their order, and number them.
pub(super) fn take_frames(messages: &mut [Message]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for message in messages {
        if let Some(Content::Parts(parts)) = &mut message.content {
            for image in parts.iter_mut().flat_map(Part::images) {
                frames.push(std::mem::take(&mut image.data));
                image.frame = frames.len();
            }
        }
    }
    frames
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
