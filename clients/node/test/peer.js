import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { decode, encode } from "@msgpack/msgpack";
import { Router } from "zeromq";
import { Client } from "hearth-client";

export const LIMITS = {
  frame_bytes: 4096,
  frames: 4,
  requests_per_client: 64,
  prompt_tokens: 2000,
  total_tokens: 4096,
  queued_requests: 256,
  queued_tokens: 65536,
  lease_s: 30,
};
const USAGE = { prompt_tokens: 9, completion_tokens: 2 };

/** A ROUTER that says what a test tells it to, and a client of it. */
export class Peer {
  #folder = mkdtempSync(`${tmpdir()}/hearth-`);
  #router = new Router({ linger: 0 });
  #from;

  constructor(options) {
    this.address = `${this.#folder}/s`;
    this.client = new Client({ address: this.address, ...options });
  }

  /** Listen at the address, again after `gone`. */
  async listen() {
    if (this.#router.closed) this.#router = new Router({ linger: 0 });
    await this.#router.bind(`ipc://${this.address}`);
    return this;
  }

  /** Stop listening, as a daemon that dies. */
  gone() {
    this.#router.close();
  }

  /** The next message of this type; others are an error, but for leases. */
  async take(t) {
    for (;;) {
      const [from, frame] = await this.#router.receive();
      this.#from = from;
      const message = decode(frame, { useBigInt64: true });
      if (message.t === t) return message;
      if (message.t !== "lease") throw new Error(`${message.t} came instead of ${t}`);
      await this.say({ t: "leased", seconds: 30 });
    }
  }

  async say(answer) {
    await this.send(encode(answer));
  }

  async send(bytes) {
    await this.#router.send([this.#from, bytes]);
  }

  /** Answer a hello, which is returned. */
  async welcome(fields) {
    const hello = await this.take("hello");
    await this.say({ t: "welcome", proto: 1, server: "scripted", limits: LIMITS, epoch: "first", ...fields });
    return hello;
  }

  /** Open a session. */
  async greet() {
    const [welcome] = await Promise.all([this.client.connect(), this.welcome()]);
    return welcome;
  }

  /** Start a generation; returns it and its id. */
  async generate(options) {
    const generation = this.client.generate({ prompt: "Tell" }, options);
    const { id } = await this.take("generate");
    return { generation, id };
  }

  async delta(id, seq, text, fields) {
    await this.say({ t: "delta", id, seq, text, ...fields });
  }

  async done(id, fields) {
    await this.say({ t: "done", id, reason: "stop", usage: USAGE, ...fields });
  }

  async close() {
    await this.client.close();
    this.#router.close();
    rmSync(this.#folder, { recursive: true });
  }
}

/** A test with a peer that listens. */
export const scene = (play, options) => async () => {
  const peer = await new Peer(options).listen();
  try {
    await play(peer);
  } finally {
    await peer.close();
  }
};
