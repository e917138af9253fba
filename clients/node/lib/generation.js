import { HearthError, RequestRefused } from "./errors.js";

/** One reply as far as it has been read. */
export class Reply {
  text = "";
  reasoning = "";
  tokens = [];
  #calls = new Map();

  /** Take in a delta of this reply. */
  add({ text, reasoning = "", tokens = [], tool_calls = [] }) {
    this.text += text;
    this.reasoning += reasoning;
    for (const token of tokens) this.tokens.push(token);
    for (const { index, id, name, arguments: piece = "" } of tool_calls) {
      const call = this.#calls.get(index) ?? { arguments: "" };
      this.#calls.set(index, { id: call.id ?? id, name: call.name ?? name, arguments: call.arguments + piece });
    }
  }

  /** The calls that are whole, in their order: the last one of a reply may have been cut. */
  get toolCalls() {
    return [...this.#calls.entries()].sort(([a], [b]) => a - b).flatMap(([, call]) => wholeCall(call));
  }

  /** The turn that this reply is in a conversation; throws RequestRefused where it is none. */
  message() {
    const calls = this.toolCalls;
    if (!this.text && calls.length === 0) {
      throw new RequestRefused("reply_empty", "the reply has no text and no whole call: ask with more max_tokens");
    }
    return {
      role: "assistant",
      ...(this.text && { content: this.text }),
      ...(this.reasoning && { reasoning: this.reasoning }),
      ...(calls.length > 0 && { tool_calls: calls }),
    };
  }
}

function wholeCall({ id, name, arguments: text }) {
  try {
    return [{ id, name, arguments: JSON.parse(text || "{}") }];
  } catch {
    return [];
  }
}

/**
 * A generation and its stream of deltas, for one reader: `for await (const delta of generation)`.
 * Leaving the loop early cancels it. A failure is thrown where it is read, with the text so far as its `text`.
 */
export class Generation {
  #exchange;
  #replies = new Map([[0, new Reply()]]);

  constructor(exchange) {
    this.#exchange = exchange;
  }

  /** The request's id on its connection. */
  get id() {
    return this.#exchange.id;
  }

  /** Reason and usage; undefined before the end, and after a failure. */
  get done() {
    return this.#exchange.answer;
  }

  /** The reasoning read so far. */
  get reasoning() {
    return this.#replies.get(0).reasoning;
  }

  /** The token ids read so far. */
  get tokens() {
    return this.#replies.get(0).tokens;
  }

  /** The calls of tools that are whole by now. */
  get toolCalls() {
    return this.#replies.get(0).toolCalls;
  }

  /** All replies that have begun; one unless the request had another `n`. */
  get choices() {
    return [...this.#replies.entries()].sort(([a], [b]) => a - b).map(([, reply]) => reply);
  }

  /** Wait until the request is queued; undefined where it began or ended without a word of that. */
  async accepted() {
    while (!this.#exchange.accepted && !this.#exchange.begun && !this.#exchange.ended) await this.#exchange.changed();
    if (!this.#exchange.accepted && this.#exchange.error !== undefined) throw this.#failure();
    return this.#exchange.accepted;
  }

  /** Read to the end; returns the text. */
  async text() {
    await this.result();
    return this.#replies.get(0).text;
  }

  /** Read to the end; returns the turn to append to the conversation. */
  async message() {
    await this.result();
    return this.#replies.get(0).message();
  }

  /** Read to the end; returns reason and usage. */
  async result() {
    while (await this.#next()) {
      // The replies keep it.
    }
    return this.#exchange.answer;
  }

  /** End the generation: its stream ends with the reason `cancelled`. Does nothing after its end. */
  cancel() {
    this.#exchange.cancel();
  }

  [Symbol.asyncIterator]() {
    return {
      next: async () => {
        const value = await this.#next();
        return value ? { value, done: false } : { value: undefined, done: true };
      },
      return: async () => {
        this.cancel();
        return { value: undefined, done: true };
      },
    };
  }

  async #next() {
    for (;;) {
      const delta = this.#exchange.next();
      if (delta) {
        const choice = delta.choice ?? 0;
        if (!this.#replies.has(choice)) this.#replies.set(choice, new Reply());
        this.#replies.get(choice).add(delta);
        return delta;
      }
      if (this.#exchange.error !== undefined) throw this.#failure();
      if (this.#exchange.answer) return undefined;
      await this.#exchange.changed();
    }
  }

  #failure() {
    const { error } = this.#exchange;
    if (error instanceof HearthError) error.text = this.#replies.get(0).text;
    return error;
  }
}
