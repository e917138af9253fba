import { Encoder } from "@msgpack/msgpack";
import { RequestRefused } from "./errors.js";

const MAX_DEPTH = 96;
// Beyond these the encoder writes a whole number as a float, and a BigInt as one of 64 bits.
const LEAST = -0x80000000;
const MOST = 0xffffffff;
const LONE_SURROGATE = /\p{Surrogate}/u;
const encoder = new Encoder({ useBigInt64: true, ignoreUndefined: true });

const refuse = (message, field) => {
  throw new RequestRefused("invalid_value", message, { field });
};

/** Characters of a text as the protocol counts them: code points, not UTF-16 units. */
export function characters(text) {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

/**
 * The frames of a request: the message first, then its pictures, each once.
 * Throws RequestRefused for a value that has no place in a message.
 */
export function writeRequest(request) {
  const pictures = new Map();
  const message = Array.isArray(request.messages)
    ? { ...request, messages: request.messages.map((turn, i) => withoutPictures(turn, `messages[${i}]`, pictures)) }
    : request;
  return [encoder.encode(encodable(message, "", 0)), ...pictures.keys()];
}

/** Refuse a request that the daemon could not attribute, or that would cost the connection. */
export function checkSizes([message, ...pictures], { limits, features = [] }) {
  if (message.length > limits.frame_bytes) {
    tooLarge("message_too_large", `the message has ${message.length} bytes`, limits.frame_bytes);
  }
  if (pictures.length === 0) return;
  const field = "messages";
  if (!limits.images || !features.includes("images")) {
    throw new RequestRefused("unsupported_option", "the server's model takes no images", { field });
  }
  if (pictures.length > limits.images) {
    refuse(`the request has ${pictures.length} pictures, the limit is ${limits.images}`, field);
  }
  const sizes = pictures.map((picture) => picture.byteLength);
  const largest = Math.max(...sizes);
  const all = sizes.reduce((sum, size) => sum + size, 0);
  if (largest > limits.image_bytes) {
    tooLarge("image_too_large", `a picture has ${largest} bytes`, limits.image_bytes, field);
  }
  if (all > limits.request_image_bytes) {
    tooLarge("image_too_large", `the pictures have ${all} bytes together`, limits.request_image_bytes, field);
  }
}

function tooLarge(code, what, limit, field) {
  throw new RequestRefused(code, `${what}, the limit is ${limit}`, { field });
}

function withoutPictures(turn, field, pictures) {
  if (!Array.isArray(turn?.content)) return turn;
  const frameOf = (picture, at) => {
    if (typeof picture !== "object" || picture === null) return refuse(`${at} is no picture`, at);
    const { data, ...says } = picture;
    if (!(data instanceof Uint8Array)) return refuse(`${at}.data has to be a Uint8Array`, `${at}.data`);
    if (!pictures.has(data)) pictures.set(data, pictures.size + 1);
    return { ...says, frame: pictures.get(data) };
  };
  const content = turn.content.map((part, j) => {
    const at = `${field}.content[${j}]`;
    if (part?.type === "image") return frameOf(part, at);
    if (part?.type !== "video" || !Array.isArray(part.frames)) return part;
    return { ...part, frames: part.frames.map((frame, k) => frameOf(frame, `${at}.frames[${k}]`)) };
  });
  return { ...turn, content };
}

const isShort = (value) => Number.isInteger(value) && value >= LEAST && value <= MOST;

/** A value as the encoder takes it, with its maps and lists copied; throws RequestRefused. */
function encodable(value, field, depth) {
  switch (typeof value) {
    case "boolean":
    case "undefined":
      return value;
    case "string":
      return LONE_SURROGATE.test(value) ? refuse(`${field} has half of a surrogate pair`, field) : value;
    case "number":
      return encodableNumber(value, field);
    case "bigint":
      if (value !== BigInt.asIntN(64, value) && value !== BigInt.asUintN(64, value)) {
        refuse(`${field} does not fit into 64 bits`, field);
      }
      return value;
    case "object":
      return value === null ? null : encodableObject(value, field, depth);
    default:
      return refuse(`${field} is a ${typeof value}, which no message has`, field);
  }
}

function encodableNumber(value, field) {
  if (!Number.isFinite(value)) return refuse(`${field} is not a finite number`, field);
  // A larger one has lost digits by now: as a float it is refused where a whole number is asked.
  return Number.isSafeInteger(value) && !isShort(value) ? BigInt(value) : value;
}

function encodableObject(value, field, depth) {
  if (depth === MAX_DEPTH) return refuse(`${field} is nested too deep`, field);
  if (Array.isArray(value)) {
    return Array.from(value, (item, i) => {
      if (isShort(item)) return item;
      const at = `${field}[${i}]`;
      return item === undefined ? refuse(`${at} is undefined`, at) : encodable(item, at, depth + 1);
    });
  }
  const prototype = Object.getPrototypeOf(value);
  if (prototype !== Object.prototype && prototype !== null) {
    return refuse(`${field} is a ${prototype.constructor?.name}, and no plain object`, field);
  }
  const taken = Object.create(null);
  for (const [name, item] of Object.entries(value)) {
    if (LONE_SURROGATE.test(name)) refuse(`a name in ${field} has half of a surrogate pair`, field);
    taken[name] = encodable(item, field ? `${field}.${name}` : name, depth + 1);
  }
  return taken;
}
