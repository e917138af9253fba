import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, Reply } from "hearth-client";
import { MAX_UNREAD_BYTES } from "../lib/exchange.js";
import { scene } from "./peer.js";

const session = (play) =>
  scene(async (peer) => {
    await peer.greet();
    await play(peer);
  });

test(
  "a stream from accepted to done",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    await peer.say({ t: "accepted", id, prompt_tokens: 9, request: "whole-1" });
    assert.equal((await generation.accepted()).prompt_tokens, 9);
    await peer.delta(id, 0, "Done", { tokens: [4] });
    await peer.delta(id, 1, ".", { tokens: [5, 6], reasoning: "Hm." });
    await peer.done(id);
    const texts = [];
    for await (const { text } of generation) texts.push(text);
    assert.deepEqual([texts, generation.tokens, generation.reasoning], [["Done", "."], [4, 5, 6], "Hm."]);
    assert.equal(generation.done.usage.completion_tokens, 2);
  }),
);

test(
  "a failure is thrown where it is read, behind what came before it",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    await peer.delta(id, 0, "so far");
    const usage = { prompt_tokens: 1, completion_tokens: 2 };
    await peer.say({ t: "error", id, code: "brand_new", message: "Other.", field: "x", retry_after_s: 3, usage });
    const want = { name: "ServiceFailed", code: "brand_new", field: "x", retry_after_s: 3, usage, text: "so far" };
    await assert.rejects(generation.text(), want);
    assert.equal(generation.done, undefined);
  }),
);

test(
  "a seq that is not the next ends its stream alone, also at the daemon",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    await peer.delta(id, 1, "x");
    await assert.rejects(generation.result(), { code: "protocol_violation", field: "seq" });
    assert.equal((await peer.take("cancel")).id, id);
    const { generation: other, id: next } = await peer.generate();
    await peer.done(next);
    assert.equal((await other.result()).reason, "stop");
  }),
);

test(
  "cancel ends the stream with its reason, and sends nothing after the end",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    generation.cancel();
    assert.equal((await peer.take("cancel")).id, id);
    await peer.delta(id, 0, "late");
    await peer.done(id, { reason: "cancelled" });
    assert.equal((await generation.result()).reason, "cancelled");
    generation.cancel();
    await peer.generate();
  }),
);

test(
  "cancel before a session is open follows the request",
  scene(async (peer) => {
    const generation = peer.client.generate({ prompt: "Tell" });
    generation.cancel();
    await peer.welcome();
    const { id } = await peer.take("generate");
    assert.equal((await peer.take("cancel")).id, id);
    await peer.done(id, { reason: "cancelled" });
    assert.equal((await generation.result()).reason, "cancelled");
  }),
);

test(
  "a request and options that are no object are refused by what they have to be",
  session(async (peer) => {
    assert.throws(() => new Client("/run/hearth.sock"), { name: "RequestRefused", message: /are an object/ });
    for (const request of ["Tell", null]) {
      await assert.rejects(peer.client.generate(request).text(), { name: "RequestRefused", message: /is an object/ });
    }
  }),
);

test(
  "leaving the loop cancels",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    await peer.delta(id, 0, "enough");
    for await (const { text } of generation) {
      assert.equal(text, "enough");
      break;
    }
    assert.equal((await peer.take("cancel")).id, id);
  }),
);

test(
  "a generation that begins without having been accepted is not waited for",
  scene(async (peer) => {
    await peer.greet();
    const { generation, id } = await peer.generate();
    const accepted = generation.accepted();
    await peer.say({ t: "delta", id, seq: 0, text: "x" });
    assert.equal(await accepted, undefined);
    await peer.done(id);
    assert.equal(await generation.text(), "x");
  }),
);

test(
  "an aborted signal ends the request with its reason, here and at the daemon",
  session(async (peer) => {
    const controller = new AbortController();
    const { signal } = controller;
    const { generation, id } = await peer.generate({ signal });
    const asked = peer.client.tokenize({ text: "x" }, { signal });
    await peer.take("tokenize");
    controller.abort();
    await assert.rejects(generation.result(), { name: "AbortError" });
    await assert.rejects(asked, { name: "AbortError" });
    assert.equal((await peer.take("cancel")).id, id);
    await assert.rejects(peer.client.generate({ prompt: "x" }, { signal }).text(), { name: "AbortError" });
    for (const reason of [null, 0, ""]) {
      const aborted = { signal: AbortSignal.abort(reason) };
      await assert.rejects(peer.client.generate({ prompt: "x" }, aborted).text(), (error) => error === reason);
      await assert.rejects(peer.client.status(aborted), (error) => error === reason);
    }
    // The answers that were on their way are ignored.
    await peer.done(id);
    await peer.generate();
  }),
);

test(
  "a reply that nobody reads is bounded, and others go on",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    const { generation: read, id: other } = await peer.generate();
    const text = "x".repeat(MAX_UNREAD_BYTES / 4);
    for (let seq = 0; seq < 5; seq++) await peer.delta(id, seq, text);
    assert.equal((await peer.take("cancel")).id, id);
    await peer.delta(other, 0, "ok");
    await peer.done(other);
    assert.equal(await read.text(), "ok");
    await assert.rejects(generation.text(), { name: "ServiceFailed", code: "slow_client" });
  }),
);

test(
  "one answer of 8 MiB finds room, and what was read makes room",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    const reader = generation[Symbol.asyncIterator]();
    for (let seq = 0; seq < 3; seq++) {
      await peer.delta(id, seq, "x".repeat(8_000_000));
      assert.equal((await reader.next()).value.text.length, 8_000_000);
    }
    await peer.done(id);
    assert.equal((await reader.next()).done, true);
  }),
);

test(
  "several replies are told apart",
  session(async (peer) => {
    const { generation, id } = await peer.generate();
    await peer.delta(id, 0, "b", { choice: 1 });
    await peer.delta(id, 1, "a");
    const choices = [1, 2].map((completion_tokens) => ({ reason: "stop", completion_tokens }));
    await peer.done(id, { choices });
    assert.equal(await generation.text(), "a");
    assert.deepEqual(generation.choices.map(({ text }) => text), ["a", "b"]);
    assert.deepEqual(generation.done.choices, choices);
  }),
);

const calls = [
  { index: 0, id: "c0", name: "f", arguments: '{"a":' },
  { index: 1, id: "c1", name: "g" },
  { index: 0, arguments: "[1]}" },
];

test("a turn has the text, the reasoning, and the calls that are whole", () => {
  const reply = new Reply();
  reply.add({ text: "", reasoning: "Hm.", tool_calls: calls });
  reply.add({ text: "", tool_calls: [{ index: 2, id: "c2", name: "cut", arguments: '{"a' }] });
  assert.deepEqual(reply.message(), {
    role: "assistant",
    reasoning: "Hm.",
    tool_calls: [
      { id: "c0", name: "f", arguments: { a: [1] } },
      { id: "c1", name: "g", arguments: {} },
    ],
  });
});

test("a reply of reasoning alone is no turn", () => {
  const reply = new Reply();
  reply.add({ text: "", reasoning: "Hm." });
  assert.throws(() => reply.message(), { name: "RequestRefused", code: "reply_empty" });
});
