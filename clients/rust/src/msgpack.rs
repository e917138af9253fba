//! Bytes of messages: encoding, and decoding of what a server sends, whatever it is.

use serde::Serialize;

use crate::error::{Code, Error};
use crate::protocol::Answer;

/// Bytes of one frame; ZeroMQ closes a connection on which a larger one comes.
pub(crate) const MAX_FRAME_BYTES: i64 = 16 << 20;
const MAX_DEPTH: usize = 64;
/// Values of one message: 4 bytes each in the largest answer, and a bound for what their decoding
/// takes.
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
/// serde would take lists for structs, numbers for names of fields, and what is followed by more
/// bytes.
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

/// Walk over one value that fills the frame: the names of its own map are text, no size is beyond
/// the frame, and depth is bounded.
fn structure(frame: &[u8]) -> Option<()> {
    let mut rest = frame;
    let mut values = 0;
    // Values to come, of the message itself and of each list or map that is open.
    let mut open = vec![1_usize];
    while let Some(left) = open.last_mut() {
        if *left == 0 {
            open.pop();
            continue;
        }
        let is_name = *left % 2 == 0;
        *left -= 1;
        values += 1;
        let (&head, tail) = rest.split_first()?;
        rest = tail;
        let is_text = matches!(head, 0xa0..=0xbf | 0xd9..=0xdb);
        if values > MAX_VALUES || (open.len() == 2 && is_name && !is_text) {
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
                open.push(items);
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

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{json, Value};

    use super::*;
    use crate::protocol::Request;

    fn vectors(file: &str) -> Vec<Value> {
        let path = format!("{}/../vectors/{file}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    fn bytes(vector: &Value) -> Vec<u8> {
        let hex = vector["hex"].as_str().unwrap().as_bytes();
        let digit = |byte: u8| char::from(byte).to_digit(16).unwrap() as u8;
        hex.chunks(2)
            .map(|pair| digit(pair[0]) << 4 | digit(pair[1]))
            .collect()
    }

    fn meaning(vector: &Value) -> Value {
        same(vector.get("means").unwrap_or(&vector["message"]).clone())
    }

    /// The same with all numbers that fit as floats, and binary in base64 as the vectors have it.
    fn same(value: Value) -> Value {
        match value {
            Value::Number(number) if number.as_i64().map_or(true, |whole| whole < 1 << 53) => {
                json!(number.as_f64())
            }
            Value::Array(items) => items.into_iter().map(same).collect(),
            Value::Object(fields) => Value::Object(
                fields
                    .into_iter()
                    .map(|(name, one)| (name, same(one)))
                    .collect(),
            ),
            other => other,
        }
    }

    fn binary_as_base64(mut message: Value) -> Value {
        let logprobs = message.get_mut("logprobs").and_then(Value::as_array_mut);
        for token in logprobs.into_iter().flatten() {
            let text = |bytes: &Value| {
                let bytes: Vec<u8> = serde_json::from_value(bytes.clone()).unwrap();
                json!(base64::encode(bytes))
            };
            if token.get("token_bytes").is_some() {
                token["token_bytes"] = text(&token["token_bytes"]);
                let top = token["top_bytes"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(text)
                    .collect();
                token["top_bytes"] = top;
            }
        }
        message
    }

    #[test]
    fn answers_mean_what_the_vectors_say() {
        let vectors = vectors("answers.json");
        assert!(!vectors.is_empty());
        for vector in vectors {
            let answer = decode(&bytes(&vector)).unwrap();
            let told = binary_as_base64(serde_json::to_value(&answer).unwrap());
            assert_eq!(same(told), meaning(&vector), "{}", vector["name"]);
        }
    }

    #[test]
    fn requests_are_what_the_vectors_say() {
        let vectors = vectors("requests.json");
        assert!(!vectors.is_empty());
        for vector in vectors {
            let request: Request = serde_json::from_value(vector["message"].clone()).unwrap();
            let sent: Value = rmp_serde::from_slice(&encode(&request).unwrap()).unwrap();
            let read: Value = rmp_serde::from_slice(&bytes(&vector)).unwrap();
            let said = same(vector["message"].clone());
            // Defaults that a program has written out may be sent.
            let sent = same(sent);
            assert!(sent == said || sent == meaning(&vector), "{}", vector["name"]);
            assert_eq!(same(read), said, "{}", vector["name"]);
        }
    }

    #[test]
    fn what_the_daemon_calls_malformed_is_no_answer() {
        for vector in vectors("malformed.json") {
            let read = decode(&bytes(&vector));
            // Requests are of a kind that this side does not know; a delta is one that it does.
            let is_fine = matches!(read, Err(_) | Ok(Answer::Unknown | Answer::Delta(_)));
            assert!(is_fine, "{}", vector["name"]);
        }
    }

    #[test]
    fn an_answer_cut_anywhere_cannot_be_read() {
        for vector in vectors("answers.json") {
            let bytes = bytes(&vector);
            for size in 0..bytes.len() {
                assert!(
                    decode(&bytes[..size]).is_err(),
                    "{} cut at {size}",
                    vector["name"]
                );
            }
            let more = [&bytes[..], &[0xc0]].concat();
            assert!(decode(&more).is_err(), "{} and more", vector["name"]);
        }
    }

    #[test]
    fn an_answer_with_any_byte_changed_is_read_or_refused() {
        for vector in vectors("answers.json") {
            let mut bytes = bytes(&vector);
            for place in 0..bytes.len() {
                let right = bytes[place];
                for wrong in [
                    0x00,
                    0x80,
                    0x9f,
                    0xa0,
                    0xc1,
                    0xc7,
                    0xdb,
                    0xdd,
                    0xdf,
                    right ^ 1,
                ] {
                    bytes[place] = wrong;
                    let _ = decode(&bytes);
                }
                bytes[place] = right;
            }
        }
    }

    #[test]
    fn hostile_sizes_and_depths_are_refused() {
        let nested = |depth| {
            [
                b"\x82\xa1t\xa1x\xa1y".to_vec(),
                vec![0x91; depth],
                vec![0xc0],
            ]
            .concat()
        };
        let many = [
            b"\x82\xa1t\xa1x\xa1y\xdd\x00\x20\x00\x01".to_vec(),
            vec![0xc0; 0x20_0001],
        ];
        let hostile: [&[u8]; 8] = [
            b"",
            b"\xdf\xff\xff\xff\xff",
            b"\x81\xa1t\xdb\xff\xff\xff\xffx",
            b"\x82\xa1t\xa6leased\xa7seconds\xdd\xff\xff\xff\xff",
            b"\x81\x00\xa6leased",
            b"\x92\xa6leased\x01",
            &nested(100_000),
            &many.concat(),
        ];
        for (number, bytes) in hostile.iter().enumerate() {
            assert!(decode(bytes).is_err(), "{number}");
        }
        assert!(matches!(
            decode(&nested(MAX_DEPTH - 1)),
            Ok(Answer::Unknown)
        ));
    }
}
