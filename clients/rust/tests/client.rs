//! The client against a scripted ROUTER, which sends what no daemon would.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{env, fs, process};

use futures::executor::block_on;
use futures::future::poll_fn;
use futures_core::Stream;
use hearth_client::{Client, Code, Error, Generate, Image, Message, Options, Reason, Tokenize};
use serde_json::{json, Value};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A ROUTER at a socket of its own, and the client that it talks with.
struct Peer {
    path: PathBuf,
    socket: Option<zmq::Socket>,
    client: Vec<u8>,
}

impl Peer {
    fn new() -> Self {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("hearth-{}-{number}", process::id()));
        let mut peer = Self {
            path,
            socket: None,
            client: Vec::new(),
        };
        peer.start();
        peer
    }

    fn start(&mut self) {
        let socket = zmq::Context::new().socket(zmq::ROUTER).unwrap();
        socket.set_linger(0).unwrap();
        socket.set_rcvtimeo(10_000).unwrap();
        socket
            .bind(&format!("ipc://{}", self.path.display()))
            .unwrap();
        self.socket = Some(socket);
    }

    fn options(&self) -> Options {
        Options::new().address(self.path.to_str().unwrap())
    }

    /// A client with an open session.
    fn greeted(&mut self, options: Options) -> Client {
        let client = options.client().unwrap();
        let opening = client.open();
        self.greet();
        opening.wait().unwrap();
        client
    }

    fn greet(&mut self) -> Value {
        let hello = self.take("hello");
        self.say(&welcome());
        hello
    }

    /// The next message, which is of this kind; renewals count for nothing.
    fn take(&mut self, kind: &str) -> Value {
        self.take_with_frames(kind).0
    }

    fn take_with_frames(&mut self, kind: &str) -> (Value, Vec<Vec<u8>>) {
        loop {
            let mut parts = self.socket.as_ref().unwrap().recv_multipart(0).unwrap();
            let frames = parts.split_off(2);
            let message: Value = rmp_serde::from_slice(&parts[1]).unwrap();
            self.client = parts.swap_remove(0);
            if message["t"] == kind {
                return (message, frames);
            }
            assert_eq!(message["t"], "lease", "{kind} was due: {message}");
        }
    }

    fn say(&self, message: &Value) {
        self.send(&rmp_serde::to_vec(message).unwrap());
    }

    fn send(&self, bytes: &[u8]) {
        let socket = self.socket.as_ref().unwrap();
        socket.send_multipart([&self.client[..], bytes], 0).unwrap();
    }

    fn delta(&self, request: &Value, seq: u64, text: &str) {
        self.say(
            &json!({"t": "delta", "id": request["id"], "seq": seq, "text": text, "tokens": [1]}),
        );
    }

    fn done(&self, request: &Value, reason: &str) {
        let usage = json!({"prompt_tokens": 9, "completion_tokens": 2});
        self.say(&json!({"t": "done", "id": request["id"], "reason": reason, "usage": usage}));
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn welcome() -> Value {
    welcome_of(30.0)
}

fn welcome_of(lease_s: f64) -> Value {
    let limits = json!({
        "frame_bytes": 4096, "frames": 3, "requests_per_client": 4, "prompt_tokens": 100,
        "total_tokens": 200, "queued_requests": 8, "queued_tokens": 800, "lease_s": lease_s,
        "images": 2, "image_bytes": 1000, "request_image_bytes": 1500,
    });
    json!({"t": "welcome", "proto": 1, "server": "scripted", "limits": limits, "epoch": "one"})
}

fn code<T>(result: Result<T, Error>) -> Code {
    result.err().expect("it fails").code().clone()
}

#[test]
fn a_reply_is_read_by_an_iterator() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let mut generation = client.generate(Generate::prompt("a").max_tokens(4).seed(u64::MAX >> 1));
    let request = peer.take("generate");
    assert_eq!(
        (&request["seed"], &request["max_tokens"]),
        (&json!(i64::MAX), &json!(4))
    );
    peer.say(
        &json!({"t": "accepted", "id": request["id"], "prompt_tokens": 9, "request": "one-1"}),
    );
    assert_eq!(generation.wait_accepted().unwrap().request, "one-1");
    peer.delta(&request, 0, "Lamp ");
    peer.delta(&request, 1, "on");
    peer.done(&request, "stop");
    let texts: Vec<String> = (&mut generation)
        .into_iter()
        .map(|one| one.unwrap().text)
        .collect();
    assert_eq!(texts, ["Lamp ", "on"]);
    assert_eq!(generation.done().unwrap().reason, Reason::Stop);
}

#[test]
fn a_reply_is_read_by_a_stream() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let generation = client.generate(Generate::prompt("a"));
    let request = peer.take("generate");
    let reader = std::thread::spawn(move || {
        let mut generation = Box::pin(generation);
        let mut text = String::new();
        block_on(async {
            while let Some(delta) = poll_fn(|context| generation.as_mut().poll_next(context)).await
            {
                text += &delta.unwrap().text;
            }
        });
        (text, generation.done().unwrap().reason)
    });
    peer.delta(&request, 0, "Lamp ");
    peer.delta(&request, 1, "on");
    peer.done(&request, "rain");
    assert_eq!(
        reader.join().unwrap(),
        ("Lamp on".to_owned(), Reason::Other("rain".to_owned()))
    );
}

#[test]
fn calls_are_put_together() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let generation = client.generate(Generate::chat([Message::user("Lamp on")]));
    let request = peer.take("generate");
    let pieces = [
        json!([{"index": 0, "id": "c0", "name": "lamp", "arguments": "{\"on\":"}]),
        json!([
            {"index": 0, "arguments": "true}"},
            {"index": 1, "id": "c1", "name": "cut", "arguments": "{"},
        ]),
    ];
    for (seq, calls) in pieces.iter().enumerate() {
        let id = &request["id"];
        peer.say(&json!({"t": "delta", "id": id, "seq": seq, "text": "", "tool_calls": calls}));
    }
    peer.done(&request, "tool_calls");
    let turn = generation.wait().unwrap().message().unwrap();
    assert_eq!(turn.content, None);
    assert_eq!(
        json!(turn.tool_calls),
        json!([{"id": "c0", "name": "lamp", "arguments": {"on": true}}])
    );
}

#[test]
fn a_generation_that_is_dropped_is_cancelled() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let generation = client.generate(Generate::prompt("a"));
    let request = peer.take("generate");
    drop(generation);
    assert_eq!(peer.take("cancel")["id"], request["id"]);
}

#[test]
fn unary_requests_are_answered() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let (tokens, text) = (
        client.tokenize(Tokenize::text("hello")),
        client.detokenize([1, 2]),
    );
    let (first, second) = (peer.take("tokenize"), peer.take("detokenize"));
    peer.say(&json!({"t": "text", "id": second["id"], "text": "hello"}));
    peer.say(&json!({"t": "tokens", "id": first["id"], "tokens": [1, 2]}));
    assert_eq!(
        (tokens.wait().unwrap(), block_on(text).unwrap()),
        (vec![1, 2], "hello".to_owned())
    );
    let wrong = client.status();
    let id = peer.take("status")["id"].clone();
    peer.say(&json!({"t": "text", "id": id, "text": "no report"}));
    assert_eq!(code(wrong.wait()), Code::ProtocolViolation);
}

#[test]
fn what_is_too_large_is_not_sent() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let ask = |parts: Vec<hearth_client::Part>| {
        code(
            client
                .generate(Generate::chat([Message::user(parts)]))
                .wait(),
        )
    };
    let picture = |bytes: usize| {
        Image::file([&b"\x89PNG"[..], &vec![0; bytes]].concat())
            .unwrap()
            .into()
    };
    let long = client.generate(Generate::prompt("x".repeat(5000))).wait();
    assert_eq!(code(long), Code::MessageTooLarge);
    assert_eq!(ask(vec![picture(1000)]), Code::ImageTooLarge);
    assert_eq!(ask(vec![picture(800), picture(800)]), Code::ImageTooLarge);
    assert_eq!(
        ask(vec![picture(1), picture(1), picture(1)]),
        Code::InvalidValue
    );
    let _fits = client.generate(Generate::chat([Message::user([picture(1), picture(2)])]));
    let (message, frames) = peer.take_with_frames("generate");
    assert_eq!(
        message["messages"][0]["content"][1],
        json!({"type": "image", "frame": 2, "format": "png"})
    );
    assert_eq!(frames, [&b"\x89PNG\0"[..], &b"\x89PNG\0\0"[..]]);
}

#[test]
fn bytes_that_cannot_be_read_end_the_session_and_the_next_request_opens_one() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let (first, second) = (client.generate(Generate::prompt("a")), client.status());
    peer.take("generate");
    peer.take("status");
    peer.send(b"\x81\xa1t\xdb\xff\xff\xff\xffx");
    assert_eq!(
        (code(first.wait()), code(second.wait())),
        (Code::ProtocolViolation, Code::ProtocolViolation)
    );
    let third = client.detokenize([]);
    peer.greet();
    let id = peer.take("detokenize")["id"].clone();
    peer.say(&json!({"t": "text", "id": id, "text": ""}));
    assert_eq!(third.wait().unwrap(), "");
}

#[test]
fn a_delta_out_of_order_ends_its_request() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let mut generation = client.generate(Generate::prompt("a"));
    let request = peer.take("generate");
    peer.delta(&request, 0, "one");
    peer.delta(&request, 2, "three");
    peer.done(&request, "stop");
    let items: Vec<_> = (&mut generation).into_iter().collect();
    assert_eq!(items.len(), 2);
    assert_eq!(
        items[1].as_ref().unwrap_err().code(),
        &Code::ProtocolViolation
    );
    assert!(generation.done().is_none() && (&mut generation).into_iter().next().is_none());
    assert_eq!(peer.take("cancel")["id"], request["id"]);
}

#[test]
fn a_reply_that_nobody_reads_ends_at_its_bound() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options().buffer_bytes(1 << 16));
    let slow = client.generate(Generate::prompt("a"));
    let request = peer.take("generate");
    for seq in 0..80 {
        peer.delta(&request, seq, &"x".repeat(1000));
    }
    assert_eq!(peer.take("cancel")["id"], request["id"]);
    assert_eq!(code(slow.wait()), Code::SlowClient);
}

#[test]
fn a_peer_that_goes_away_is_noticed_and_found_again() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let lost = client.generate(Generate::prompt("a"));
    peer.take("generate");
    peer.socket = None;
    assert_eq!(code(lost.wait()), Code::ConnectionLost);
    let status = client.open();
    peer.start();
    peer.greet();
    assert_eq!(status.wait().unwrap().server, "scripted");
}

#[test]
fn the_lease_is_renewed_by_the_clock_and_silence_is_a_loss() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options().silence(Duration::from_millis(300)));
    let silent = client.generate(Generate::prompt("a"));
    peer.take("generate");
    peer.socket.as_ref().unwrap().recv_multipart(0).unwrap();
    assert_eq!(code(silent.wait()), Code::ConnectionTimeout);
}

#[test]
fn a_connection_that_ends_before_the_welcome_is_made_again() {
    let mut peer = Peer::new();
    let client = peer.options().client().unwrap();
    let opening = client.open();
    peer.take("hello");
    // Behind a new name of the socket's, so that somebody listens all the time.
    let old = peer.socket.take();
    fs::remove_file(&peer.path).unwrap();
    peer.start();
    drop(old);
    peer.greet();
    assert_eq!(opening.wait().unwrap().server, "scripted");
}

#[test]
fn all_that_came_before_a_loss_is_read() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let generation = client.generate(Generate::prompt("a"));
    let request = peer.take("generate");
    // As many as ZeroMQ reads ahead, and slower to decode than to receive.
    let tokens: Vec<u32> = vec![70_000; 2_000];
    for seq in 0..900 {
        peer.say(&json!({
            "t": "delta", "id": request["id"], "seq": seq, "text": "x", "tokens": tokens,
        }));
    }
    peer.done(&request, "stop");
    peer.socket.as_ref().unwrap().set_linger(10_000).unwrap();
    peer.socket = None;
    assert_eq!(generation.wait().unwrap().text.len(), 900);
}

#[test]
fn a_welcome_that_cannot_be_is_refused() {
    for lease_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut peer = Peer::new();
        let opening = peer.options().client().unwrap().open();
        peer.take("hello");
        // JSON has no such numbers: the last value of the message takes the place of 30.
        let mut bytes = rmp_serde::to_vec(&welcome_of(30.5)).unwrap();
        let written = [&[0xcb][..], &30.5_f64.to_be_bytes()].concat();
        let place = bytes.windows(9).position(|one| one == written).unwrap();
        bytes[place + 1..place + 9].copy_from_slice(&lease_s.to_be_bytes());
        peer.send(&bytes);
        assert_eq!(code(opening.wait()), Code::ProtocolViolation, "{lease_s}");
    }
}

#[test]
fn a_lease_and_waits_of_any_length_are_kept() {
    for lease_s in [1e-300, 1e308] {
        let mut peer = Peer::new();
        let options = peer.options().timeout(Duration::MAX);
        let client = options.silence(Duration::MAX).client().unwrap();
        let opening = client.open();
        peer.take("hello");
        peer.say(&welcome_of(lease_s));
        opening.wait().unwrap();
        let reply = client.generate(Generate::prompt("a"));
        let request = peer.take("generate");
        peer.done(&request, "stop");
        reply.wait().unwrap();
    }
}

#[test]
fn an_answer_of_another_kind_ends_its_request() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let asked = client.tokenize(Tokenize::text("a"));
    let request = peer.take("tokenize");
    peer.delta(&request, 0, "x");
    assert_eq!(code(asked.wait()), Code::ProtocolViolation);
    let asked = client.tokenize(Tokenize::text("a"));
    let request = peer.take("tokenize");
    peer.say(&json!({"t": "accepted", "id": request["id"], "prompt_tokens": 9}));
    assert_eq!(code(asked.wait()), Code::ProtocolViolation);
}

#[test]
fn a_daemon_that_is_not_there_is_told_at_once() {
    let absent = Options::new().address("/nowhere/hearth.sock");
    assert_eq!(code(absent.connect()), Code::ConnectionRefused);
    let mute = Peer::new();
    let timeout = mute.options().timeout(Duration::from_millis(50));
    assert_eq!(code(timeout.connect()), Code::ConnectionTimeout);
    assert_eq!(
        code(Options::new().address("tcp://127.0.0.1:1").connect()),
        Code::InvalidValue
    );
    assert_eq!(
        code(Options::new().address("x".repeat(108)).connect()),
        Code::InvalidValue
    );
}

#[test]
fn a_server_that_knows_no_features_is_greeted_without() {
    let mut peer = Peer::new();
    let client = peer.options().client().unwrap();
    let opening = client.open();
    assert!(peer.take("hello")["features"].is_array());
    let code = "unsupported_option";
    peer.say(&json!({"t": "error", "code": code, "message": "no", "field": "features"}));
    assert!(peer.greet().get("features").is_none());
    opening.wait().unwrap();
}

#[test]
fn what_is_open_ends_when_the_client_is_closed() {
    let mut peer = Peer::new();
    let client = peer.greeted(peer.options());
    let open = client.generate(Generate::prompt("a"));
    peer.take("generate");
    client.close();
    assert_eq!(code(open.wait()), Code::ClientClosed);
    assert_eq!(code(client.status().wait()), Code::ClientClosed);
    peer.take("bye");
}

#[test]
fn the_example_is_the_program_of_the_readme() {
    let example = include_str!("../examples/lamp.rs");
    let (_, program) = example.split_once("\n\n").unwrap();
    assert!(include_str!("../README.md").contains(program));
}
