// Bench of ../conformance/BENCH.md: one JSON object on standard output.
import { randomBytes } from "node:crypto";
import { Client } from "hearth-client";

const WARM_UP = 20;
const ROUND_TRIPS = 200;
const TOKENS = 256;
const PICTURES = 5;
const SIDE = 512;

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

const rounded = (value) => value && Number(value.toFixed(2));

async function timed(task) {
  const began = performance.now();
  await task();
  return performance.now() - began;
}

async function statusUs(client) {
  for (let i = 0; i < WARM_UP; i++) await client.status();
  const times = [];
  for (let i = 0; i < ROUND_TRIPS; i++) times.push(await timed(() => client.status()));
  return 1000 * median(times);
}

async function deltaUs(client) {
  let deltas = 0;
  const stream = async (max_tokens) => {
    deltas = 0;
    for await (const _ of client.generate({ prompt: "Once upon a time", max_tokens, ignore_eos: true })) deltas += 1;
  };
  await stream(WARM_UP);
  const total = await timed(() => stream(TOKENS));
  return (1000 * total) / deltas;
}

async function imageMs(client) {
  const { features = [] } = await client.connect();
  if (!features.includes("images")) return null;
  const times = [];
  for (let i = 0; i <= PICTURES; i++) {
    // The daemon would know a picture again that it has seen.
    const data = Buffer.alloc(4 * SIDE * SIDE, randomBytes(64));
    const content = [{ type: "image", data, encoding: "rgba8", width: SIDE, height: SIDE }];
    const request = { messages: [{ role: "user", content }], max_tokens: 1 };
    times.push(await timed(() => client.generate(request).result()));
  }
  return median(times.slice(1));
}

const client = new Client({ address: process.argv[2] });
try {
  const figures = {
    status_us: rounded(await statusUs(client)),
    delta_us: rounded(await deltaUs(client)),
    image_ms: rounded(await imageMs(client)),
    rss_kb: Math.round(process.memoryUsage.rss() / 1024),
  };
  process.stdout.write(`${JSON.stringify(figures)}\n`);
} finally {
  await client.close();
}
