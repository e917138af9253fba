import assert from "node:assert/strict";
import { test } from "node:test";
import { encode } from "@msgpack/msgpack";
import { Client, FEATURES } from "hearth-client";
import { LIMITS, Peer, scene } from "./peer.js";

const lost = { name: "ConnectionFailed", code: "connection_lost" };

test(
  "hello says what was asked, and the welcome is passed on",
  scene(
    async (peer) => {
      const [{ epoch, limits }, hello] = await Promise.all([peer.client.connect(), peer.welcome()]);
      assert.deepEqual([epoch, limits.lease_s], ["first", 30]);
      assert.deepEqual(hello, { t: "hello", proto: [1], client: "🙂".repeat(128), lease_s: 12.5, features: FEATURES });
    },
    { name: "🙂".repeat(128), leaseS: 12.5 },
  ),
);

test(
  "a server that refuses features is greeted once without",
  scene(async (peer) => {
    const connected = peer.client.connect();
    const refusal = { t: "error", code: "unsupported_option", message: "No.", field: "features" };
    assert.ok((await peer.take("hello")).features.length > 0);
    await peer.say(refusal);
    assert.deepEqual((await peer.take("hello")).features, []);
    await peer.say(refusal);
    await assert.rejects(connected, { name: "RequestRefused", field: "features" });
  }),
);

test(
  "a refused hello tells when to come again",
  scene(async (peer) => {
    const connected = peer.client.connect();
    await peer.take("hello");
    await peer.say({ t: "error", code: "too_many_clients", message: "Full.", retry_after_s: 1.5 });
    await assert.rejects(connected, { name: "ServiceFailed", code: "too_many_clients", retry_after_s: 1.5 });
    await peer.greet();
  }),
);

test(
  "no welcome in time",
  scene(
    async (peer) => {
      await assert.rejects(peer.client.connect(), { name: "ConnectionFailed", code: "connection_timeout" });
    },
    { timeoutS: 0.05 },
  ),
);

test("nobody listens", async () => {
  const peer = new Peer();
  await assert.rejects(peer.client.connect(), { name: "ConnectionFailed", code: "connection_refused" });
  await assert.rejects(peer.client.status(), { code: "connection_refused" });
  await peer.close();
});

test(
  "many requests at once are sent in their order",
  scene(async (peer) => {
    await peer.greet();
    const count = 300;
    const asked = Array.from({ length: count }, (_, i) => peer.client.tokenize({ text: `${i}` }));
    for (let i = 0; i < count; i++) {
      const { id, text } = await peer.take("tokenize");
      assert.equal(text, `${i}`);
      await peer.say({ t: "tokens", id, tokens: [i] });
    }
    assert.deepEqual(await Promise.all(asked), Array.from({ length: count }, (_, i) => [i]));
  }),
);

test(
  "a request is sent as it was when it was asked",
  scene(async (peer) => {
    const messages = [{ role: "user", content: "one" }];
    const asked = peer.client.tokenize({ messages });
    messages.push({ role: "user", content: "two" });
    await peer.welcome();
    const { id, messages: sent } = await peer.take("tokenize");
    assert.equal(sent.length, 1);
    await peer.say({ t: "tokens", id, tokens: [] });
    assert.deepEqual(await asked, []);
  }),
);

test(
  "what is too large is not sent, and the next request is",
  scene(async (peer) => {
    await peer.greet();
    await assert.rejects(peer.client.tokenize({ text: "x".repeat(4096) }), { code: "message_too_large" });
    await assert.rejects(peer.client.tokenize({ text: "x", id: "mine" }), { code: "invalid_value", field: "id" });
    const told = peer.client.detokenize([1]);
    await peer.say({ t: "text", id: (await peer.take("detokenize")).id, text: "x" });
    assert.equal(await told, "x");
  }),
);

test(
  "a daemon that dies is a loss at once, what it said before is read, and the next request waits for it",
  scene(async (peer) => {
    await peer.greet();
    const { generation, id } = await peer.generate();
    const { generation: other, id: last } = await peer.generate();
    await peer.delta(id, 0, "so far");
    await peer.done(last);
    // What a ROUTER has not written yet is lost with it.
    assert.equal((await other.result()).reason, "stop");
    peer.gone();
    await assert.rejects(generation.text(), { ...lost, text: "so far" });
    const report = peer.client.detokenize([1]);
    await peer.listen();
    await peer.welcome({ epoch: "second" });
    const again = await peer.take("detokenize");
    assert.notEqual(again.id, id);
    await peer.say({ t: "text", id: again.id, text: "back" });
    assert.equal(await report, "back");
  }),
);

for (const [name, answer] of Object.entries({
  "hello_required": { t: "error", code: "hello_required", message: "Who?" },
  "hello_required under the id of a request": { t: "error", id: "1", code: "hello_required", message: "Who?" },
  "another epoch": {
    t: "welcome",
    proto: 1,
    server: "s",
    epoch: "second",
    limits: {
      frame_bytes: 1,
      frames: 1,
      requests_per_client: 1,
      prompt_tokens: 1,
      total_tokens: 1,
      queued_requests: 1,
      queued_tokens: 1,
      lease_s: 1,
    },
  },
})) {
  test(
    `a loss: ${name}`,
    scene(async (peer) => {
      await peer.greet();
      const { generation } = await peer.generate();
      const { generation: other } = await peer.generate();
      await peer.say(answer);
      await assert.rejects(generation.result(), lost);
      await assert.rejects(other.result(), lost);
      await peer.greet();
    }),
  );
}

test(
  "bytes that cannot be read end the session",
  scene(async (peer) => {
    await peer.greet();
    const { generation } = await peer.generate();
    await peer.send(Buffer.from("c1", "hex"));
    await assert.rejects(generation.result(), { name: "ConnectionFailed", code: "protocol_violation" });
    await peer.greet();
  }),
);

test(
  "an error of no request leaves requests alone, and so does what nobody asked for",
  scene(async (peer) => {
    await peer.greet();
    const { generation, id } = await peer.generate();
    await peer.say({ t: "error", code: "internal", message: "Something." });
    await peer.say({ t: "weather", id });
    await peer.done("nobody");
    await peer.done(id);
    await peer.done(id);
    assert.equal((await generation.result()).reason, "stop");
  }),
);

test(
  "names and extensions that the decoder refuses are skipped where they are unknown",
  scene(async (peer) => {
    await peer.greet();
    const { generation, id } = await peer.generate();
    const odd = { ["__proto__"]: { text: "x" }, constructor: 1, seventeen: 9 };
    const timestamp = Buffer.from("a46c61746581a161c703ff010203", "hex");
    const delta = encode({ t: "delta", id, seq: 0, text: "yes", choices: odd, ["__proto__"]: 1 });
    delta[0] += 1;
    await peer.send(Buffer.concat([delta, timestamp]));
    await peer.done(id);
    assert.equal(await generation.text(), "yes");
  }),
);

for (const [name, lease_s] of Object.entries({ none: 0, negative: -1, NaN, infinite: Infinity })) {
  test(
    `a lease that cannot be: ${name}`,
    scene(async (peer) => {
      const refused = assert.rejects(peer.client.connect(), { code: "protocol_violation", field: "lease_s" });
      await peer.welcome({ limits: { ...LIMITS, lease_s } });
      await refused;
    }),
  );
}

test(
  "silence is a loss, after leases that were not answered",
  scene(
    async (peer) => {
      await peer.greet();
      const { generation } = await peer.generate();
      await assert.rejects(generation.result(), { name: "ConnectionFailed", code: "connection_timeout" });
    },
    { silenceS: 0.05 },
  ),
);

test(
  "close says bye and ends what is open, once",
  scene(async (peer) => {
    await peer.greet();
    const { generation } = await peer.generate();
    const status = assert.rejects(peer.client.status(), { code: "client_closed" });
    await peer.take("status");
    await Promise.all([peer.client.close(), peer.client.close(), peer.take("bye"), status]);
    await assert.rejects(generation.result(), { name: "ConnectionFailed", code: "client_closed" });
    await assert.rejects(peer.client.connect(), { code: "client_closed" });
  }),
);

test(
  "an answer of another kind ends its request alone",
  scene(async (peer) => {
    await peer.greet();
    const wrong = peer.client.tokenize({ text: "x" });
    const right = peer.client.tokenize({ text: "y" });
    await peer.say({ t: "text", id: (await peer.take("tokenize")).id, text: "x" });
    await peer.send(encode({ t: "tokens", id: (await peer.take("tokenize")).id, tokens: [1] }));
    await assert.rejects(wrong, { code: "protocol_violation" });
    assert.deepEqual(await right, [1]);
  }),
);

for (const [option, value] of Object.entries({
  tiemoutS: 1,
  timeoutS: 0,
  silenceS: "5",
  name: "x".repeat(129),
  leaseS: NaN,
})) {
  test(`an option that cannot be: ${option}`, () =>
    assert.throws(() => new Client({ [option]: value }), { name: "RequestRefused", code: "invalid_value" }));
}
