import { setImmediate as nextTurn } from "node:timers/promises";
import { Dealer } from "zeromq";
import { absence } from "./address.js";
import { MAX_ANSWER_BYTES, readAnswer } from "./answers.js";
import { ConnectionFailed, HearthError, ServiceFailed, copyOf, errorFor } from "./errors.js";
import { writeRequest } from "./requests.js";

const PROTOCOL = 1;
/** Renewals in the time of a lease: two of them may be late. */
const RENEWALS = 3;
/** The shortest time between two of them, whatever lease is given. */
const SHORTEST_RENEWAL_MS = 10;
/** Messages that wait for the daemon to take them. */
const MAX_WAITING = 1024;
const FAREWELL_MS = 200;
const ENDS_SESSION = new Set(["hello_required", "lease_expired", "not_allowed"]);

const lost = (message) => new ConnectionFailed("connection_lost", message);

/**
 * One session on a socket of its own, from `hello` to its end: the only task that sends and the only one that
 * reads. `opened` is the promise of its welcome, `failure` why it has ended.
 */
export class Session {
  failure;
  welcome;
  #socket;
  #place;
  #hello;
  #silenceMs;
  #patientUntil;
  #onEnd;
  #open = new Map();
  #sent = Promise.resolve();
  #waiting = 0;
  #arrived = 0;
  #probing = false;
  #deadline;
  #lease;
  #heardAt = performance.now();
  #silentMs = 0;
  #settle;

  /** `patientUntil` is the time of performance.now() until which a daemon that is not there is waited for. */
  constructor({ place, curve, hello, timeoutMs, silenceMs, patientUntil, onEnd }) {
    this.#place = place;
    this.#hello = hello;
    this.#silenceMs = silenceMs;
    this.#patientUntil = patientUntil;
    this.#onEnd = onEnd;
    this.opened = new Promise((resolve, reject) => {
      this.#settle = { resolve, reject };
    });
    // Who waits for it is told; a loss without anybody waiting is no fault of the program.
    this.opened.catch(() => undefined);
    const sendTimeout = Math.ceil(silenceMs);
    this.#socket = new Dealer({ linger: 0, maxMessageSize: MAX_ANSWER_BYTES, sendTimeout, ...curve });
    this.#watch().catch((error) => this.#lose(lost(`the socket's monitor failed: ${error.message}`)));
    this.#read();
    this.#deadline = setTimeout(() => this.#late(), timeoutMs);
    try {
      this.#socket.connect(place);
    } catch (error) {
      this.#lose(new ConnectionFailed("connection_refused", `cannot connect to ${place}: ${error.message}`));
    }
    this.#greet();
  }

  /** Send a request and let `exchange` take its answers. */
  request(exchange, frames) {
    if (this.failure) throw copyOf(this.failure);
    if (this.#waiting >= MAX_WAITING) {
      throw new ServiceFailed("too_many_requests", `${MAX_WAITING} messages wait to be sent: try again later`);
    }
    this.#open.set(exchange.id, exchange);
    this.#send(frames);
  }

  /** End a generation at the daemon, which answers with its `done`. */
  cancel(exchange) {
    if (this.#open.has(exchange.id)) this.#send(writeRequest({ t: "cancel", id: exchange.id }));
  }

  /** Take no more answers for a request, and end it at the daemon if it is a generation. */
  forget(exchange) {
    if (exchange.streams) this.cancel(exchange);
    this.#open.delete(exchange.id);
  }

  /** Leave: what is open ends with `error`, the daemon is told. */
  async close(error) {
    const told = this.welcome && !this.failure;
    if (!this.#end(error)) return;
    if (told) {
      await this.#sent;
      this.#socket.linger = FAREWELL_MS;
      this.#socket.sendTimeout = FAREWELL_MS;
      await this.#socket.send(writeRequest({ t: "bye" })).catch(() => undefined);
    }
    this.#socket.close();
  }

  #lose(error) {
    if (this.#end(error)) this.#socket.close();
  }

  #end(error) {
    if (this.failure) return false;
    this.failure = error;
    clearTimeout(this.#deadline);
    clearInterval(this.#lease);
    this.#settle.reject(error);
    const open = [...this.#open.values()];
    this.#open.clear();
    for (const exchange of open) exchange.fail(copyOf(error));
    this.#onEnd(this);
    return true;
  }

  // zeromq.js takes one send at a time, and fails the second.
  #send(frames) {
    this.#waiting += 1;
    this.#sent = this.#sent
      .then(() => (this.failure ? undefined : this.#socket.send(frames)))
      .catch((error) =>
        this.#lose(new ConnectionFailed("connection_timeout", `the daemon takes nothing more: ${error.message}`)),
      )
      .finally(() => {
        this.#waiting -= 1;
      });
  }

  #greet() {
    this.#send(writeRequest(this.#hello));
  }

  async #read() {
    try {
      for await (const [frame] of this.#socket) {
        this.#arrived += 1;
        this.#heardAt = performance.now();
        this.#silentMs = 0;
        const answer = readAnswer(frame);
        if (answer) this.#take(answer, frame.length);
        if (this.failure) return;
      }
    } catch (error) {
      this.#lose(error instanceof HearthError ? error : lost(`the socket failed: ${error.message}`));
    }
  }

  async #watch() {
    for await (const { type } of this.#socket.events) {
      if (this.failure) return;
      if (type === "disconnect") await this.#disconnected();
      else if (type === "connect:retry") await this.#unmet();
      else if (type === "handshake:error:auth") {
        this.#lose(new ConnectionFailed("not_allowed", `the daemon at ${this.#place} does not list this key`));
      }
    }
  }

  #take(answer, bytes) {
    if (answer.t === "welcome") return this.#welcomed(answer);
    if (answer.t === "leased") return undefined;
    if (answer.t === "error" && (!answer.id || answer.code === "hello_required")) return this.#fault(answer);
    const exchange = this.#open.get(answer.id);
    if (!exchange) return undefined;
    try {
      exchange.take(answer, bytes);
    } catch (error) {
      this.forget(exchange);
      exchange.fail(error);
    }
    if (exchange.ended) this.#open.delete(answer.id);
    return undefined;
  }

  #welcomed(welcome) {
    if (welcome.proto !== PROTOCOL) {
      const message = `the server speaks protocol ${welcome.proto}, which was not offered`;
      return this.#lose(new ConnectionFailed("unsupported_protocol", message));
    }
    const lease = welcome.limits.lease_s;
    if (!(Number.isFinite(lease) && lease > 0)) {
      const message = `the server gives a lease of ${lease} s`;
      return this.#lose(new ConnectionFailed("protocol_violation", message, { field: "lease_s" }));
    }
    if (this.welcome && this.welcome.epoch !== welcome.epoch) return this.#lose(lost("the daemon was restarted"));
    const first = !this.welcome;
    this.welcome = welcome;
    clearTimeout(this.#deadline);
    clearInterval(this.#lease);
    const period = Math.max(Math.min(1000 * lease, this.#silenceMs) / RENEWALS, SHORTEST_RENEWAL_MS);
    this.#lease = setInterval(() => this.#renew(period), period);
    if (first) this.#settle.resolve(welcome);
    return undefined;
  }

  #renew(period) {
    const now = performance.now();
    // A program that stood still may have been stopped together with the daemon.
    this.#silentMs += Math.min(now - this.#heardAt, 1.5 * period);
    this.#heardAt = now;
    if (this.#silentMs >= this.#silenceMs) {
      const message = `the daemon has said nothing for ${this.#silenceMs / 1000} s`;
      this.#lose(new ConnectionFailed("connection_timeout", message));
    } else {
      this.#send(writeRequest({ t: "lease" }));
    }
  }

  #fault(answer) {
    if (this.welcome) {
      // Others answer a message that has no valid id, and this client sends none.
      if (ENDS_SESSION.has(answer.code)) this.#lose(errorFor(answer));
    } else if (answer.code === "unsupported_option" && answer.field === "features" && this.#hello.features.length) {
      // A server of 0.1.0 does not know the field.
      this.#hello = { ...this.#hello, features: [] };
      this.#greet();
    } else if (answer.code !== "hello_required") {
      this.#lose(errorFor(answer));
    }
  }

  async #disconnected() {
    // Whoever listened is gone and cannot have kept the first hello.
    if (!this.welcome) return this.#greet();
    // What came before the end is still to be read: two turns of the event loop without a message.
    for (let quiet = 0; quiet < 2 && !this.failure; ) {
      const seen = this.#arrived;
      await nextTurn();
      quiet = seen === this.#arrived ? quiet + 1 : 0;
    }
    return this.#lose(lost("the daemon closed the connection"));
  }

  async #unmet() {
    if (this.welcome || this.#probing || performance.now() < this.#patientUntil) return;
    this.#probing = true;
    const reason = await absence(this.#place);
    this.#probing = false;
    if (reason && !this.welcome) this.#lose(reason);
  }

  async #late() {
    const reason = await absence(this.#place);
    if (this.welcome) return;
    const message = `no answer from a daemon at ${this.#place}: is \`hearth serve\` running?`;
    this.#lose(reason ?? new ConnectionFailed("connection_timeout", message));
  }
}
