//! Bytes of messages: encoding, and decoding of what a server sends, whatever it is.

use serde::Serialize;

use crate::error::{Code, Error};
use crate::protocol::Answer;

/// Bytes of one frame; ZeroMQ closes a connection on which a larger one comes.
pub(crate) const MAX_FRAME_BYTES: i64 = 16 << 20;
const MAX_DEPTH: usize = 64;
/// Values of one message: 4 bytes each in the largest answer, and a bound for what their decoding takes.
const MAX_VALUES: usize = 2 << 20;

pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, Error> {
    rmp_serde::to_vec_named(message).map_err(|_| {
        Error::new(
            Code::InvalidValue,
            "the request holds a value that cannot be encoded",
        )
    })
}

/// The answer in a frame.
///
/// serde would take lists for structs, numbers for names of fields, and a message that is followed by others.
pub(crate) fn decode(frame: &[u8]) -> Result<Answer, Error> {
    let unreadable = || {
        Error::new(
            Code::ProtocolViolation,
            "the server sent a message that cannot be read",
        )
    };
    let is_map = matches!(frame.first(), Some(0x80..=0x8f | 0xde | 0xdf));
    if !is_map || structure(frame).is_none() {
        return Err(unreadable());
    }
    rmp_serde::from_slice(frame).map_err(|_| unreadable())
}

/// Walk over one value that fills the frame: names in maps are text, no size is beyond the frame, depth is bounded.
fn structure(frame: &[u8]) -> Option<()> {
    let mut rest = frame;
    let mut values = 0;
    // Of each open list or map: items to come, and whether names and values take turns.
    let mut open = vec![(1_usize, false)];
    while let Some((left, is_map)) = open.last_mut() {
        if *left == 0 {
            open.pop();
            continue;
        }
        let is_name = *is_map && *left % 2 == 0;
        *left -= 1;
        values += 1;
        let (&head, tail) = rest.split_first()?;
        rest = tail;
        if values > MAX_VALUES || is_name && !matches!(head, 0xa0..=0xbf | 0xd9..=0xdb) {
            return None;
        }
        let skipped = match head {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 0,
            0xc1 => return None,
            0xa0..=0xbf => usize::from(head & 0x1f),
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xd4..=0xd8 => 1 + (1 << (head - 0xd4)),
            0xc4 | 0xd9 => size(&mut rest, 1)?,
            0xc5 | 0xda => size(&mut rest, 2)?,
            0xc6 | 0xdb => size(&mut rest, 4)?,
            0xc7 => 1 + size(&mut rest, 1)?,
            0xc8 => 1 + size(&mut rest, 2)?,
            0xc9 => 1 + size(&mut rest, 4)?,
            0x80..=0x9f | 0xdc..=0xdf => {
                let count = match head {
                    0xdc | 0xde => size(&mut rest, 2)?,
                    0xdd | 0xdf => size(&mut rest, 4)?,
                    _ => usize::from(head & 0x0f),
                };
                let is_map = matches!(head, 0x80..=0x8f | 0xde | 0xdf);
                let items = if is_map { count.checked_mul(2)? } else { count };
                if items > rest.len() || open.len() > MAX_DEPTH {
                    return None;
                }
                open.push((items, is_map));
                0
            }
        };
        rest = rest.get(skipped..)?;
    }
    rest.is_empty().then_some(())
}

fn size(rest: &mut &[u8], bytes: usize) -> Option<usize> {
    let (head, tail) = (rest.get(..bytes)?, rest.get(bytes..)?);
    *rest = tail;
    Some(
        head.iter()
            .fold(0, |sum, &byte| sum << 8 | usize::from(byte)),
    )
}
