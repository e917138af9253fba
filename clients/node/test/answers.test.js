import assert from "node:assert/strict";
import { test } from "node:test";
import { encode } from "@msgpack/msgpack";
import { readAnswer } from "../lib/answers.js";
import { ConnectionFailed } from "../lib/errors.js";
import { bytes, vectors } from "./vectors.js";

const violation = { name: "ConnectionFailed", code: "protocol_violation" };
const packed = (value) => Buffer.from(encode(value));

/** The same with binary in base64, as vectors have it. */
const plain = (answer) =>
  JSON.parse(
    JSON.stringify(answer, function inBase64(name, value) {
      return this[name] instanceof Uint8Array ? Buffer.from(this[name]).toString("base64") : value;
    }),
  );

for (const { name, hex, message, means = message } of vectors("answers.json")) {
  test(`answer: ${name}`, () => assert.deepEqual(plain(readAnswer(bytes(hex))), means));
}

for (const { from, hex, message } of vectors("conversation.json")) {
  if (from === "server") {
    test(`conversation: ${message.t}`, () => assert.deepEqual(plain(readAnswer(bytes(hex))), message));
  }
}

for (const { name, client, hex } of vectors("malformed_answers.json")) {
  test(`malformed answer: ${name}`, () => {
    // An answer of an unknown type, or one that nobody has asked for, is read and ignored later.
    if (client === "ignores") assert.notEqual(readAnswer(bytes(hex))?.id, "1");
    else assert.throws(() => readAnswer(bytes(hex)), violation);
  });
}

const head = "85a174a564656c7461a26964a131a373657100a474657874a0";
for (const [name, hex] of Object.entries({
  "a list of four billion": `${head}a6746f6b656e73ddffffffff01`,
  "lists that claim 64 MiB each": `${head}a178${"dd00800000".repeat(60)}`,
  "a map of four billion": "dfffffffffa174",
  "text of four billion bytes": `${head}a178dbffffffff78`,
  "bytes of four billion": `${head}a178c6ffffffff00`,
  "an extension of four billion": `${head}a178c9ffffffff0100`,
  "lists in lists without end": `${head}a178${"91".repeat(100_000)}01`,
  "text that is no UTF-8": "82a174a66c6561736564a178a2fffe",
  "half of a surrogate pair": "82a174a66c6561736564a178a3eda080",
})) {
  test(`hostile answer: ${name}`, () => assert.throws(() => readAnswer(bytes(hex)), violation));
}

test("an answer cut anywhere, or with a byte changed, is read or refused", () => {
  for (const { hex } of vectors("answers.json")) {
    const whole = bytes(hex);
    for (let i = 0; i < whole.length; i++) {
      assert.throws(() => readAnswer(whole.subarray(0, i)), violation);
      for (const byte of [0x00, 0x80, 0x9f, 0xc1, 0xc7, 0xd9, 0xdd, 0xdf, 0xff]) {
        const changed = Buffer.from(whole);
        changed[i] = byte;
        try {
          readAnswer(changed);
        } catch (error) {
          assert.ok(error instanceof ConnectionFailed, String(error.stack));
        }
      }
    }
  }
});

test("fields of later servers are left out, whatever their keys and values are", () => {
  assert.equal(readAnswer(packed({ t: "weather", x: [null, 2 ** 63] })), undefined);
  assert.deepEqual(readAnswer(bytes("83a174a66c6561736564a77365636f6e647303a17882c0018101c0d4010a")), {
    t: "leased",
    seconds: 3,
  });
});

test("nil where a field may be left out is none", () => {
  const answer = { t: "error", code: "internal", message: "No.", id: "1", retry_after_s: null, usage: null };
  assert.deepEqual(readAnswer(packed(answer)), { t: "error", code: "internal", message: "No.", id: "1" });
});

test("an answer of 8 MiB", () => {
  const text = "🙂".repeat(2 << 20);
  assert.equal(readAnswer(packed({ t: "text", id: "1", text })).text, text);
});
