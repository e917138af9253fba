import { ConnectionFailed, ServiceFailed, errorFor } from "./errors.js";

/** Bytes of answers that a stream keeps for its reader at most; one answer is always kept. */
export const MAX_UNREAD_BYTES = 4 << 20;

/** Answers to one request: taken in by its session, read by the program. */
export class Exchange {
  accepted;
  /** The terminal answer of a request that did not fail. */
  answer;
  /** What the request failed with: an error, or whatever a program has aborted with. */
  error;
  /** Called once when the request has ended. */
  onEnd = () => undefined;
  #terminal;
  #session;
  #cancelled = false;
  #deltas = [];
  #head = 0;
  #nextSeq = 0;
  #unread = 0;
  #change;

  /** `terminal` is the type of the answer that ends the request. */
  constructor(id, terminal) {
    this.id = id;
    this.#terminal = terminal;
  }

  /** Whether the request is a generation. */
  get streams() {
    return this.#terminal === "done";
  }

  /** Whether a delta has come. */
  get begun() {
    return this.#nextSeq > 0;
  }

  /** Whether no answer will follow. */
  get ended() {
    return this.answer !== undefined || this.error !== undefined;
  }

  /** Take an answer that takes `bytes` on the wire; throws where it is not allowed or finds no room. */
  take(answer, bytes) {
    if (answer.t === "error") this.error = errorFor(answer);
    else if (answer.t === this.#terminal) this.answer = answer;
    else if (answer.t === "accepted" && this.streams) this.accepted ??= answer;
    else if (answer.t === "delta" && this.streams) this.#keep(answer, bytes);
    else throw new ConnectionFailed("protocol_violation", `${answer.t} came where ${this.#terminal} was due`);
    this.#notify();
  }

  /** Send the request, and behind it its cancel if that was asked meanwhile. */
  send(session, frames) {
    this.#session = session;
    session.request(this, frames);
    if (this.#cancelled) session.cancel(this);
  }

  /** End a generation at the daemon; does nothing after its end. */
  cancel() {
    this.#cancelled = true;
    this.#session?.cancel(this);
  }

  /** End the request here at once, and at the daemon. */
  abort(reason) {
    this.#session?.forget(this);
    this.fail(reason);
  }

  /** End the request with `error`, unless it has ended. */
  fail(error) {
    if (this.ended) return;
    this.error = error;
    this.#notify();
  }

  /** The next delta that nobody has read; undefined when there is none. */
  next() {
    const entry = this.#deltas[this.#head];
    if (!entry) return undefined;
    this.#deltas[this.#head++] = undefined;
    this.#unread -= entry.bytes;
    if (this.#head === this.#deltas.length) {
      this.#deltas = [];
      this.#head = 0;
    }
    return entry.delta;
  }

  /** Wait for the next answer or failure. */
  changed() {
    if (!this.#change) {
      this.#change = {};
      this.#change.promise = new Promise((resolve) => {
        this.#change.resolve = resolve;
      });
    }
    return this.#change.promise;
  }

  #keep(delta, bytes) {
    if (delta.seq !== this.#nextSeq) {
      const message = `delta ${delta.seq} came where ${this.#nextSeq} was due`;
      throw new ConnectionFailed("protocol_violation", message, { field: "seq" });
    }
    if (this.#unread > 0 && this.#unread + bytes > MAX_UNREAD_BYTES) {
      throw new ServiceFailed("slow_client", `${MAX_UNREAD_BYTES} bytes of the reply wait for their reader`);
    }
    this.#nextSeq += 1;
    this.#unread += bytes;
    this.#deltas.push({ delta, bytes });
  }

  #notify() {
    if (this.ended) this.onEnd();
    this.#change?.resolve();
    this.#change = undefined;
  }
}
