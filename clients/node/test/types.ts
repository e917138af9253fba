// A program that uses all of the API: the compiler checks index.d.ts by it, nothing runs it.
import { Client, ConnectionFailed, FEATURES, type GenerateRequest, HearthError, type Message } from "../index.js";

const client = new Client({ address: "/run/h.sock", timeoutS: 1, features: [...FEATURES, "generation_defaults"] });
const request: GenerateRequest = { prompt: "Once", seed: 9223372036854775807n, logit_bias: [[1, -100]] };

async function main(signal: AbortSignal): Promise<void> {
  const { limits, epoch = "" } = await client.connect();
  const generation = client.generate(request, { signal });
  const accepted: number | undefined = (await generation.accepted())?.prompt_tokens;
  for await (const { text, tokens = [], logprobs } of generation) {
    console.log(text, tokens.length, logprobs?.[0].top?.[0][1]);
  }
  const turns: Message[] = [
    { role: "user", content: [{ type: "image", data: new Uint8Array(1), format: "png" }] },
    await client.generate({ messages: [{ role: "user", content: "?" }], tools: [{ name: "t" }] }).message(),
  ];
  const done = await client.generate({ messages: turns, response_format: { type: "json_object" } }).result();
  const ids: number[] = await client.tokenize({ text: "x" }, { signal: AbortSignal.timeout(1000) });
  const whole: string = await client.detokenize(ids);
  console.log(limits.images ?? 0, epoch, accepted, done.usage.cached_tokens, done.choices?.[0].stop, whole);
  console.log((await client.status()).executor?.prefill.seconds, generation.choices[0].toolCalls[0].name);
}

main(new AbortController().signal).catch((error: unknown) => {
  if (error instanceof ConnectionFailed) console.log(error.kind === "connection", error.text);
  else if (error instanceof HearthError) console.log(error.code, error.retry_after_s, error.usage?.queue_ms);
});

// @ts-expect-error: one of prompt and messages
client.generate({ prompt: "x", messages: [] });
// @ts-expect-error: raw pixels need their size
client.generate({ messages: [{ role: "user", content: [{ type: "image", data: new Uint8Array(1), encoding: "rgb8" }] }] });
// @ts-expect-error: no such option
client.generate({ prompt: "x", best_of: 2 });
