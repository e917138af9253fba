// Bench of ../conformance/BENCH.md: one JSON object on standard output.
import { randomBytes } from "node:crypto";
import { Client } from "hearth-client";

const SIDE = 512;
const SESSIONS = 32;

async function median(count, task) {
  const all = [];
  for (let i = -Math.floor(count / 10) - 1; i < count; i++) {
    const time = await task();
    if (i >= 0) all.push(time);
  }
  all.sort((a, b) => a - b);
  return (all[Math.floor((count - 1) / 2)] + all[Math.floor(count / 2)]) / 2;
}

async function timed(task) {
  const began = performance.now();
  await task();
  return performance.now() - began;
}

async function deltaMs(client) {
  let deltas = 0;
  const time = await timed(async () => {
    const request = { prompt: "Once upon a time", max_tokens: 256, ignore_eos: true };
    for await (const _ of client.generate(request)) deltas += 1;
  });
  return time / deltas;
}

async function imageMs(client) {
  const data = Buffer.alloc(4 * SIDE * SIDE, randomBytes(64));
  const content = [{ type: "image", data, encoding: "rgba8", width: SIDE, height: SIDE }];
  const request = { messages: [{ role: "user", content }], max_tokens: 1 };
  return timed(() => client.generate(request).result());
}

async function open() {
  const client = new Client({ address: process.argv[2] });
  await client.status();
  return client;
}

async function sessionKb() {
  const before = process.memoryUsage.rss();
  const more = [];
  for (let i = 0; i < SESSIONS; i++) more.push(await open());
  const after = process.memoryUsage.rss();
  for (const client of more) await client.close();
  return (after - before) / 1024 / SESSIONS;
}

const client = await open();
const rss_kb = await sessionKb();
const status_us = 1000 * (await median(200, () => timed(() => client.status())));
const delta_us = 1000 * (await median(20, () => deltaMs(client)));
const image_ms = await median(10, () => imageMs(client));
await client.close();
process.stdout.write(`${JSON.stringify({ status_us, delta_us, image_ms, rss_kb })}\n`);
