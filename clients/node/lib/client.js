import { curveOptions, endpoint } from "./address.js";
import { ConnectionFailed, RequestRefused, copyOf } from "./errors.js";
import { Exchange } from "./exchange.js";
import { Generation } from "./generation.js";
import { characters, checkSizes, writeRequest } from "./requests.js";
import { Session } from "./session.js";

/** What this client reads beyond the first version of the protocol. */
export const FEATURES = Object.freeze(["reasoning", "tool_calls", "end_details", "token_bytes"]);
const MAX_NAME = 128;
const MAX_WAIT_S = 1e6;
const OPTIONS = new Set(["address", "keyFile", "name", "timeoutS", "silenceS", "leaseS", "features", "statusOnly"]);

/**
 * A client of the daemon. It opens a session with the first request, keeps its lease, and opens another one with
 * the next request after a loss. It keeps the program alive until `close`.
 */
export class Client {
  #options;
  #hello;
  #session;
  #left;
  #ids = 0;
  #patientUntil = 0;

  constructor(options = {}) {
    if (typeof options !== "object" || options === null) refuse("options are an object, such as { address }");
    const unknown = Object.keys(options).find((name) => !OPTIONS.has(name));
    if (unknown) refuse(`there is no option ${unknown}`, unknown);
    const { timeoutS = 5, silenceS = 5, leaseS, name = "", features = FEATURES, statusOnly = false } = options;
    for (const [option, value] of Object.entries({ timeoutS, silenceS })) {
      if (typeof value !== "number" || !(value > 0 && value <= MAX_WAIT_S)) {
        refuse(`${option} has to be a number of seconds above 0 and up to ${MAX_WAIT_S}`, option);
      }
    }
    if (typeof name !== "string" || characters(name) > MAX_NAME) {
      refuse(`name has to be a text of ${MAX_NAME} characters at most`, "name");
    }
    this.#hello = {
      t: "hello",
      proto: [1],
      client: name,
      lease_s: leaseS,
      status_only: statusOnly || undefined,
      features: [...features],
    };
    // What cannot be encoded is refused here, and not by each session.
    writeRequest(this.#hello);
    this.#options = { address: options.address, keyFile: options.keyFile, timeoutS, silenceS };
  }

  /** Open a session, unless one is open; returns what the daemon says of itself. */
  async connect() {
    return (await this.#opened()).welcome;
  }

  /** Ask for text by the fields of `generate`; nothing is thrown before the generation is read. */
  generate(request, { signal } = {}) {
    return new Generation(this.#ask("generate", "done", request, signal));
  }

  /** Token ids of `text` or `messages`. */
  async tokenize(request, { signal } = {}) {
    return (await answered(this.#ask("tokenize", "tokens", request, signal))).tokens;
  }

  /** Text of token ids. */
  async detokenize(tokens, { signal } = {}) {
    return (await answered(this.#ask("detokenize", "text", { tokens }, signal))).text;
  }

  /** State of the daemon. */
  async status({ signal } = {}) {
    const { t, id, ...report } = await answered(this.#ask("status", "status_report", {}, signal));
    return report;
  }

  /** Leave: what is open fails with `client_closed`. */
  close() {
    this.#left ??= Promise.resolve(this.#session?.close(closed()));
    return this.#left;
  }

  #ask(t, terminal, request, signal) {
    const exchange = new Exchange(String(++this.#ids), terminal);
    this.#start(exchange, t, request, signal).catch((error) => exchange.fail(copyOf(error)));
    return exchange;
  }

  async #start(exchange, t, request, signal) {
    signal?.throwIfAborted();
    if (typeof request !== "object" || request === null) refuse("a request is an object, such as { prompt }");
    for (const name of ["t", "id"]) {
      if (request[name] !== undefined) refuse(`${name} is the client's own`, name);
    }
    // The program may change what it has given as soon as this call has returned.
    const frames = writeRequest({ ...request, t, id: exchange.id });
    const abort = () => exchange.abort(signal.reason);
    signal?.addEventListener("abort", abort, { once: true });
    exchange.onEnd = () => signal?.removeEventListener("abort", abort);
    const session = await this.#opened();
    checkSizes(frames, session.welcome);
    if (!exchange.ended) exchange.send(session, frames);
  }

  async #opened() {
    if (this.#left) throw closed();
    if (!this.#session || this.#session.failure) this.#session = this.#open();
    const session = this.#session;
    await session.opened;
    return session;
  }

  #open() {
    const { address, keyFile, timeoutS, silenceS } = this.#options;
    const place = endpoint(address);
    return new Session({
      place,
      curve: curveOptions(place, keyFile ?? process.env.HEARTH_KEY),
      hello: this.#hello,
      timeoutMs: 1000 * timeoutS,
      silenceMs: 1000 * silenceS,
      patientUntil: this.#patientUntil,
      onEnd: (session) => {
        // A daemon that was there may be about to start again.
        if (session.welcome) this.#patientUntil = performance.now() + 1000 * timeoutS;
      },
    });
  }
}

const closed = () => new ConnectionFailed("client_closed", "this client was closed: make another one");

async function answered(exchange) {
  while (!exchange.ended) await exchange.changed();
  if (exchange.error !== undefined) throw exchange.error;
  return exchange.answer;
}

function refuse(message, field) {
  throw new RequestRefused("invalid_value", message, { field });
}
