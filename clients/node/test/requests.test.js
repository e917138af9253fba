import assert from "node:assert/strict";
import { test } from "node:test";
import { decode } from "@msgpack/msgpack";
import { characters, checkSizes, writeRequest } from "../lib/requests.js";
import { bytes, narrowed, vectors } from "./vectors.js";

const read = (frame) => decode(frame, { useBigInt64: true });
const refused = (code, field) => ({ name: "RequestRefused", code, field });

/** The message as a program gives it: pictures have their bytes in place of a number. */
function withData(message, frames) {
  const shown = ({ frame, ...says }) => ({ ...says, data: frames[frame - 1] });
  const part = (one) => {
    if (one.type === "image") return shown(one);
    return one.type === "video" ? { ...one, frames: one.frames.map(shown) } : one;
  };
  const turn = (one) => (Array.isArray(one.content) ? { ...one, content: one.content.map(part) } : one);
  return { ...message, messages: message.messages.map(turn) };
}

/** The message with each picture's bytes in place of its frame's number, as frames may come in any order. */
const resolved = (message, frames) =>
  frames.length ? withData(message, frames.map((frame) => Buffer.from(frame).toString("hex"))) : message;

for (const { name, hex, message, frames = [] } of vectors("requests.json")) {
  test(`request: ${name}`, () => {
    const pictures = frames.map((one) => Buffer.from(one, "base64"));
    assert.deepEqual(narrowed(read(bytes(hex))), message);
    const [frame, ...sent] = writeRequest(pictures.length ? withData(message, pictures) : message);
    assert.deepEqual(resolved(narrowed(read(frame)), sent), resolved(message, pictures));
  });
}

test("whole numbers keep their digits", () => {
  const ends = { seed: 9223372036854775807n, list: [-(2n ** 63n), 2n ** 64n - 1n] };
  const given = { ...ends, a: 2 ** 53 - 1, b: -(2 ** 40), c: 2 ** 32 };
  const want = { ...ends, a: 2n ** 53n - 1n, b: -(2n ** 40n), c: 2n ** 32n };
  assert.deepEqual(read(writeRequest(given)[0]), want);
  // One that has lost digits is a float, which a daemon refuses where it asks for a whole number.
  const [frame] = writeRequest({ seed: 2 ** 53 + 2 });
  assert.equal(frame[6], 0xcb);
});

const circle = {};
circle.self = circle;
for (const [name, request, field] of [
  ["not a number", { temperature: NaN }, "temperature"],
  ["more than 64 bits", { seed: 2n ** 64n }, "seed"],
  ["half of a surrogate pair", { messages: [{ role: "user", content: "\ud83d" }] }, "messages[0].content"],
  ["half of one in a name", { template: { "\udc00": 1 } }, "template"],
  ["a function", { stop: [() => 1] }, "stop[0]"],
  ["a hole", { stop: ["a", , "b"] }, "stop[1]"],
  ["a date", { template: { now: new Date(0) } }, "template.now"],
  ["bytes", { prompt: new Uint8Array(1) }, "prompt"],
  ["a picture without bytes", { messages: [{ content: [{ type: "image", data: "x" }] }] }, "messages[0].content[0].data"],
]) {
  test(`not sent: ${name}`, () => assert.throws(() => writeRequest(request), refused("invalid_value", field)));
}

test("not sent: what contains itself", () => assert.throws(() => writeRequest(circle), { code: "invalid_value" }));

test("characters are code points", () => {
  assert.equal(characters("🙂".repeat(64)), 64);
  assert.equal(characters("e\u0301"), 2);
});

test("a picture that is shown twice is sent once", () => {
  const data = Buffer.from("picture");
  const part = { type: "image", data, format: "png" };
  const [frame, ...pictures] = writeRequest({ messages: [{ role: "user", content: [part, part] }] });
  assert.deepEqual(pictures, [data]);
  assert.deepEqual(read(frame).messages[0].content, Array(2).fill({ type: "image", format: "png", frame: 1 }));
});

const limits = { frame_bytes: 10, images: 2, image_bytes: 4, request_image_bytes: 6 };
const sized = (...sizes) => sizes.map((size) => new Uint8Array(size));
for (const [frames, code, features] of [
  [sized(11), "message_too_large"],
  [sized(10, 5), "image_too_large"],
  [sized(10, 4, 3), "image_too_large"],
  [sized(10, 1, 1, 1), "invalid_value"],
  [sized(10, 1), "unsupported_option", []],
]) {
  const sizes = frames.map((frame) => frame.length);
  test(`not sent: frames of ${sizes} bytes, features ${features ?? "images"}`, () =>
    assert.throws(() => checkSizes(frames, { limits, features: features ?? ["images"] }), { code }));
}

test("frames within the limits are sent", () => checkSizes(sized(10, 4, 2), { limits, features: ["images"] }));
