import { isUtf8 } from "node:buffer";
import { Decoder } from "@msgpack/msgpack";
import { ConnectionFailed } from "./errors.js";

/** Bytes of an answer at most; ZeroMQ closes the connection for a larger frame. */
export const MAX_ANSWER_BYTES = 16 << 20;
const MAX_DEPTH = 64;
const PROTO = Buffer.from("__proto__");
// Names in fields of later servers may be anything; what is no text names nothing here. The decoder refuses
// `__proto__` and timestamps of a wrong size, which are to be skipped as all else that is unknown.
const decoder = new Decoder({
  mapKeyConverter: (key) => (typeof key === "string" ? key : ""),
  keyDecoder: {
    canBeCached: (size) => size === PROTO.length,
    decode: (bytes, at, size) => {
      const name = Buffer.from(bytes.buffer, bytes.byteOffset + at, size);
      return name.equals(PROTO) ? "" : name.toString();
    },
  },
  extensionCodec: { tryToEncode: () => null, decode: () => undefined },
});

class Malformed extends Error {}

// The decoder allocates what a header claims and nests without end, so the bytes are walked first.
function endOf(bytes, start, depth) {
  const type = byteAt(bytes, start);
  const at = start + 1;
  if (type < 0x80 || type >= 0xe0) return at;
  if (type < 0x90) return endOfItems(bytes, at, 2 * (type & 0x0f), depth);
  if (type < 0xa0) return endOfItems(bytes, at, type & 0x0f, depth);
  if (type < 0xc0) return endOfText(bytes, at, type & 0x1f);
  switch (type) {
    case 0xc0:
    case 0xc2:
    case 0xc3:
      return at;
    case 0xc4:
    case 0xc5:
    case 0xc6:
      return endOfBytes(bytes, at + (1 << (type - 0xc4)), numberAt(bytes, at, 1 << (type - 0xc4)));
    case 0xc7:
    case 0xc8:
    case 0xc9:
      return endOfBytes(bytes, at + (1 << (type - 0xc7)), 1 + numberAt(bytes, at, 1 << (type - 0xc7)));
    case 0xca:
    case 0xcb:
      return endOfBytes(bytes, at, 4 << (type - 0xca));
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
      return endOfBytes(bytes, at, 1 << (type - 0xcc));
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
      return endOfBytes(bytes, at, 1 << (type - 0xd0));
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
      return endOfBytes(bytes, at, 1 + (1 << (type - 0xd4)));
    case 0xd9:
    case 0xda:
    case 0xdb:
      return endOfText(bytes, at + (1 << (type - 0xd9)), numberAt(bytes, at, 1 << (type - 0xd9)));
    case 0xdc:
    case 0xdd:
      return endOfItems(bytes, at + (2 << (type - 0xdc)), numberAt(bytes, at, 2 << (type - 0xdc)), depth);
    case 0xde:
    case 0xdf:
      return endOfItems(bytes, at + (2 << (type - 0xde)), 2 * numberAt(bytes, at, 2 << (type - 0xde)), depth);
    default:
      throw new Malformed("a byte without meaning");
  }
}

function byteAt(bytes, at) {
  if (at >= bytes.length) throw new Malformed("cut short");
  return bytes[at];
}

function numberAt(bytes, at, size) {
  endOfBytes(bytes, at, size);
  return bytes.readUIntBE(at, size);
}

function endOfBytes(bytes, at, size) {
  if (size > bytes.length - at) throw new Malformed("cut short");
  return at + size;
}

function endOfText(bytes, at, size) {
  const end = endOfBytes(bytes, at, size);
  for (let i = at; i < end; i++) {
    if (bytes[i] >= 0x80) {
      if (!isUtf8(bytes.subarray(i, end))) throw new Malformed("text that is not UTF-8");
      break;
    }
  }
  return end;
}

function endOfItems(bytes, at, count, depth) {
  if (depth === MAX_DEPTH) throw new Malformed("nested too deep");
  if (count > bytes.length - at) throw new Malformed("cut short");
  let end = at;
  for (let i = 0; i < count; i++) end = endOf(bytes, end, depth + 1);
  return end;
}

// --- what an answer has: a reader takes a value and returns it, or throws Malformed

const isMap = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array);

const of = (test) => (value) => {
  if (!test(value)) throw new Malformed("a field of another type");
  return value;
};
const text = of((value) => typeof value === "string");
const integer = of(Number.isInteger);
const number = of((value) => typeof value === "number");
const binary = of((value) => value instanceof Uint8Array);
const scalar = of((value) => typeof value === "string" || typeof value === "number");

const list = (item) => (value) => {
  if (!Array.isArray(value)) throw new Malformed("a field that is no list");
  return value.map((one) => item(one));
};
const pair = (first, second) => (value) => {
  if (!Array.isArray(value) || value.length !== 2) throw new Malformed("a field that is no pair");
  return [first(value[0]), second(value[1])];
};
const dictionary = (item) => (value) => {
  if (!isMap(value)) throw new Malformed("a field that is no map");
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, item(one)]));
};

/** Reader of a map: unknown fields are left out, and so is nil where a field is optional. */
const map = (required, optional = {}) => {
  const fields = Object.entries(required);
  const others = Object.entries(optional);
  return (value) => {
    if (!isMap(value)) throw new Malformed("a field that is no map");
    const taken = {};
    for (const [name, read] of fields) taken[name] = read(value[name]);
    for (const [name, read] of others) {
      const found = value[name];
      if (found !== undefined && found !== null) taken[name] = read(found);
    }
    return taken;
  };
};

const usage = map(
  { prompt_tokens: integer, completion_tokens: integer },
  {
    reasoning_tokens: integer,
    cached_tokens: integer,
    queue_ms: number,
    prefill_ms: number,
    decode_ms: number,
  },
);
const rounds = { rounds: integer, drafted: integer, accepted: integer, accept_length: number };
const stage = map({ steps: integer, tokens: integer, seconds: number });

const ANSWERS = {
  welcome: map(
    {
      proto: integer,
      server: text,
      limits: map(
        {
          frame_bytes: integer,
          frames: integer,
          requests_per_client: integer,
          prompt_tokens: integer,
          total_tokens: integer,
          queued_requests: integer,
          queued_tokens: integer,
          lease_s: number,
        },
        { images: integer, image_bytes: integer, request_image_bytes: integer, image_tokens: integer },
      ),
    },
    { features: list(text), model: text, epoch: text, adapters: list(text), tool_format: text },
  ),
  leased: map({ seconds: number }),
  accepted: map({ id: text, prompt_tokens: integer }, { request: text }),
  delta: map(
    { id: text, seq: integer, text },
    {
      tokens: list(integer),
      logprobs: list(
        map({ logprob: number }, { top: list(pair(integer, number)), token_bytes: binary, top_bytes: list(binary) }),
      ),
      ended: number,
      reasoning: text,
      tool_calls: list(map({ index: integer }, { id: text, name: text, arguments: text })),
      choice: integer,
    },
  ),
  done: map(
    { id: text, reason: text, usage },
    {
      images: map(
        { count: integer, tokens: integer },
        {
          cached: integer,
          sizes: list(pair(integer, integer)),
          decode_ms: number,
          resize_ms: number,
          engine_ms: number,
        },
      ),
      speculation: map(rounds),
      stop: text,
      choices: list(map({ reason: text, completion_tokens: integer }, { stop: text })),
    },
  ),
  error: map({ code: text, message: text }, { id: text, field: text, retry_after_s: number, usage }),
  tokens: map({ id: text, tokens: list(integer) }),
  text: map({ id: text, text }),
  status_report: map(
    {
      id: text,
      server: text,
      model: text,
      state: text,
      uptime_s: number,
      clients: integer,
      running: integer,
      queued: integer,
      queued_tokens: integer,
    },
    {
      stage: text,
      share: number,
      reason: text,
      places: integer,
      totals: dictionary(integer),
      engine: dictionary(scalar),
      adapters: list(text),
      executor: map(
        { prefill: stage, generation: stage },
        {
          adapter: text,
          switches: integer,
          prefix: map(
            { rows: integer, hits: integer, queried: integer, reused: integer },
            { bytes: dictionary(integer) },
          ),
          images: map({
            images: integer,
            tokens: integer,
            merge_seconds: number,
            encoded: integer,
            encode_seconds: number,
          }),
          speculation: map({
            ...rounds,
            steps: integer,
            accepted_by_position: list(integer),
            draft_s: number,
            verify_s: number,
            commit_s: number,
          }),
        },
      ),
    },
  ),
};

/**
 * The answer in a frame, with `t` and the fields of PROTOCOL.md; undefined for a type of later servers.
 * Throws ConnectionFailed for bytes that are no answer.
 */
export function readAnswer(frame) {
  try {
    if (endOf(frame, 0, 0) !== frame.length) throw new Malformed("bytes behind the message");
    const value = decoder.decode(frame);
    if (!isMap(value) || typeof value.t !== "string") throw new Malformed("no map with a type");
    if (!Object.hasOwn(ANSWERS, value.t)) return undefined;
    return { t: value.t, ...ANSWERS[value.t](value) };
  } catch (error) {
    throw new ConnectionFailed("protocol_violation", `the server sent what cannot be read: ${error.message}`);
  }
}
