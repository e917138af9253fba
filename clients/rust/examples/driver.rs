//! The driver of clients/conformance: commands from standard input, events to standard output, a
//! JSON object a line.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::process;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hearth_client::{
    Canceller, Client, Delta, Error, ErrorKind, Generate, Generation, Image, Message, Options,
    Part, Tokenize,
};
use serde::de::DeserializeOwned;
use serde_json::{json, Map, Value};

type Fields = Map<String, Value>;
/// A fault of the command itself, for the suite to see.
type Fault = Box<dyn std::error::Error>;

fn main() {
    let mut driver = Driver {
        address: std::env::args().nth(1),
        ..Driver::default()
    };
    for line in io::stdin().lock().lines() {
        let command: Fields = match line
            .map_err(Fault::from)
            .and_then(|line| Ok(serde_json::from_str(&line)?))
        {
            Ok(command) => command,
            Err(fault) => {
                eprintln!("driver: no command: {fault}");
                break;
            }
        };
        if command.get("do") == Some(&json!("close")) {
            break;
        }
        if let Err(fault) = driver.execute(&command) {
            emit(
                "failed",
                command.get("as"),
                json!({"code": "invalid_value", "message": fault.to_string(), "kind": "request"}),
            );
        }
    }
    driver.close();
}

#[derive(Default)]
struct Driver {
    address: Option<String>,
    options: Options,
    client: Option<Client>,
    unread: HashMap<String, Generation>,
    cancellers: HashMap<String, Canceller>,
    threads: Vec<JoinHandle<()>>,
}

impl Driver {
    fn execute(&mut self, command: &Fields) -> Result<(), Fault> {
        let name = command
            .get("as")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        match command
            .get("do")
            .and_then(Value::as_str)
            .unwrap_or_default()
        {
            "connect" => self.connect(command)?,
            "generate" => {
                let generation = self.client()?.generate(generate(command)?);
                self.cancellers.insert(name.clone(), generation.canceller());
                self.unread.insert(name.clone(), generation);
                if command.get("read") != Some(&json!(false)) {
                    self.read(name);
                }
            }
            "read" => self.read(name),
            "cancel" => {
                if let Some(canceller) = self.cancellers.get(&name) {
                    canceller.cancel();
                }
            }
            "tokenize" => {
                let pending = self.client()?.tokenize(tokenize(command)?);
                self.spawn(move || {
                    report(
                        &name,
                        "tokens",
                        pending.wait().map(|tokens| json!({ "tokens": tokens })),
                    )
                });
            }
            "detokenize" => {
                let tokens: Vec<u64> = field(&request(command)?, "tokens")?.unwrap_or_default();
                let pending = self.client()?.detokenize(tokens);
                self.spawn(move || {
                    report(
                        &name,
                        "text",
                        pending.wait().map(|text| json!({ "text": text })),
                    )
                });
            }
            "status" => {
                let pending = self.client()?.status();
                self.spawn(move || {
                    report(
                        &name,
                        "status_report",
                        pending.wait().map(|status| to_json(&status)),
                    )
                });
            }
            other => return Err(format!("there is no command {other:?}").into()),
        }
        Ok(())
    }

    fn connect(&mut self, command: &Fields) -> Result<(), Fault> {
        let mut options = Options::new();
        if let Some(address) = &self.address {
            options = options.address(address);
        }
        if let Some(seconds) = field(command, "timeout_s")? {
            options = options.timeout(Duration::from_secs_f64(seconds));
        }
        if let Some(seconds) = field(command, "silence_s")? {
            options = options.silence(Duration::from_secs_f64(seconds));
        }
        if let Some(seconds) = field(command, "lease_s")? {
            options = options.lease(Duration::from_secs_f64(seconds));
        }
        if let Some(features) = field::<Vec<String>>(command, "features")? {
            options = options.features(features);
        }
        if let Some(name) = field::<String>(command, "name")? {
            options = options.name(name);
        }
        let opening = match &self.client {
            // After a loss: the same client counts its ids on.
            Some(client) if options == self.options => client.open(),
            _ => {
                let client = options.clone().client()?;
                self.options = options;
                self.client.insert(client).open()
            }
        };
        self.spawn(move || match opening.wait() {
            Ok(welcome) => emit("connected", None, json!({ "welcome": to_json(&welcome) })),
            Err(error) => emit("failed", None, failure(&error)),
        });
        Ok(())
    }

    fn client(&self) -> Result<&Client, Fault> {
        self.client
            .as_ref()
            .ok_or_else(|| "there was no connect before".into())
    }

    fn read(&mut self, name: String) {
        if let Some(generation) = self.unread.remove(&name) {
            self.spawn(move || read(&name, generation));
        }
    }

    fn spawn(&mut self, work: impl FnOnce() + Send + 'static) {
        self.threads.push(thread::spawn(work));
    }

    fn close(mut self) {
        if let Some(client) = &self.client {
            client.close();
        }
        // Those that nobody has read end as well.
        for (name, generation) in std::mem::take(&mut self.unread) {
            self.spawn(move || read(&name, generation));
        }
        let failed = self
            .threads
            .into_iter()
            .filter_map(|thread| thread.join().err())
            .count();
        emit("closed", None, json!({}));
        process::exit(i32::from(failed > 0));
    }
}

fn read(name: &str, mut generation: Generation) {
    if let Some(accepted) = generation.wait_accepted() {
        emit(
            "accepted",
            Some(&json!(name)),
            json!({ "prompt_tokens": accepted.prompt_tokens }),
        );
    }
    for item in &mut generation {
        match item {
            Ok(delta) => emit("delta", Some(&json!(name)), delta_fields(&delta)),
            Err(error) => emit("failed", Some(&json!(name)), failure(&error)),
        }
    }
    if let Some(done) = generation.done() {
        emit("done", Some(&json!(name)), to_json(&done));
    }
}

fn report(name: &str, event: &str, answer: Result<Value, Error>) {
    match answer {
        Ok(fields) => emit(event, Some(&json!(name)), fields),
        Err(error) => emit("failed", Some(&json!(name)), failure(&error)),
    }
}

fn emit(event: &str, name: Option<&Value>, fields: Value) {
    let mut line = Map::new();
    line.insert("event".to_owned(), json!(event));
    if let Value::Object(fields) = fields {
        line.extend(fields.into_iter().filter(|(name, _)| name != "id"));
    }
    if let Some(name) = name {
        line.insert("as".to_owned(), name.clone());
    }
    let mut output = io::stdout().lock();
    // Where nobody reads any more there is nobody to tell.
    if writeln!(output, "{}", Value::Object(line))
        .and_then(|()| output.flush())
        .is_err()
    {
        process::exit(1);
    }
}

fn failure(error: &Error) -> Value {
    let mut fields = json!({"code": error.code(), "message": error.message(), "kind": kind(error)});
    if !error.field().is_empty() {
        fields["field"] = json!(error.field());
    }
    if let Some(time) = error.retry_after() {
        fields["retry_after_s"] = json!(time.as_secs_f64());
    }
    if let Some(usage) = error.usage() {
        fields["usage"] = to_json(usage);
    }
    fields
}

fn kind(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Request => "request",
        ErrorKind::Service => "service",
        ErrorKind::Connection => "connection",
        _ => "client",
    }
}

/// The fields of a delta, bytes in base64.
fn delta_fields(delta: &Delta) -> Value {
    let mut fields = to_json(delta);
    fields["tokens"] = json!(delta.tokens);
    let told = fields.get_mut("logprobs").and_then(Value::as_array_mut);
    for (token, told) in delta.logprobs.iter().zip(told.into_iter().flatten()) {
        if !token.token_bytes.is_empty() {
            told["token_bytes"] = json!(base64::encode(&token.token_bytes));
        }
        if !token.top_bytes.is_empty() {
            told["top_bytes"] = token.top_bytes.iter().map(base64::encode).collect();
        }
    }
    fields
}

fn to_json(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("answers have names that are text")
}

fn field<T: DeserializeOwned>(fields: &Fields, name: &str) -> Result<Option<T>, Fault> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(
            serde_json::from_value(value.clone()).map_err(|error| format!("{name}: {error}"))?,
        )),
    }
}

fn request(command: &Fields) -> Result<Fields, Fault> {
    Ok(field(command, "request")?.unwrap_or_default())
}

fn generate(command: &Fields) -> Result<Generate, Fault> {
    let mut fields = request(command)?;
    let messages = take_messages(&mut fields)?;
    let mut request: Generate = serde_json::from_value(Value::Object(fields))?;
    request.messages = messages;
    Ok(request)
}

fn tokenize(command: &Fields) -> Result<Tokenize, Fault> {
    let mut fields = request(command)?;
    let messages = take_messages(&mut fields)?;
    let mut request: Tokenize = serde_json::from_value(Value::Object(fields))?;
    request.messages = messages;
    Ok(request)
}

/// Take out the turns, whose pictures the suite gives in base64.
fn take_messages(fields: &mut Fields) -> Result<Option<Vec<Message>>, Fault> {
    let turns: Option<Vec<Fields>> = field(fields, "messages")?;
    fields.remove("messages");
    turns
        .map(|turns| turns.into_iter().map(message).collect())
        .transpose()
}

fn message(mut turn: Fields) -> Result<Message, Fault> {
    let parts = match turn.get("content") {
        Some(Value::Array(parts)) => Some(
            parts
                .iter()
                .map(part)
                .collect::<Result<Vec<Part>, Fault>>()?,
        ),
        _ => None,
    };
    if parts.is_some() {
        turn.remove("content");
    }
    let mut message: Message = serde_json::from_value(Value::Object(turn))?;
    if let Some(parts) = parts {
        message.content = Some(parts.into());
    }
    Ok(message)
}

fn part(part: &Value) -> Result<Part, Fault> {
    let fields = part.as_object().ok_or("a part is an object")?;
    match part["type"].as_str().unwrap_or_default() {
        "image" => Ok(image(fields)?.into()),
        "video" => {
            let frames: Vec<Fields> = field(fields, "frames")?.unwrap_or_default();
            let timed =
                |frame: &Fields| Ok((image(frame)?, field(frame, "time_s")?.unwrap_or_default()));
            Ok(Part::video(
                frames
                    .iter()
                    .map(timed)
                    .collect::<Result<Vec<_>, Fault>>()?,
            ))
        }
        _ => Ok(serde_json::from_value(part.clone())?),
    }
}

fn image(fields: &Fields) -> Result<Image, Fault> {
    let data = base64::decode(field::<String>(fields, "data")?.unwrap_or_default())?;
    if let Some(format) = field(fields, "format")? {
        return Ok(Image::of_format(format, data));
    }
    let encoding = field(fields, "encoding")?.ok_or("a picture has a format or an encoding")?;
    let side = |name| field(fields, name).map(Option::unwrap_or_default);
    let image = Image::raw(encoding, side("width")?, side("height")?, data);
    Ok(match field(fields, "step")? {
        Some(step) => image.step(step),
        None => image,
    })
}
