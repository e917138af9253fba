const REQUEST = new Set([
  "invalid_value",
  "unsupported_option",
  "grammar_invalid",
  "prompt_empty",
  "prompt_too_long",
  "capacity_exceeded",
  "bad_message",
  "message_too_large",
  "unknown_message",
  "duplicate_id",
  "repeated_failure",
  "adapter_unknown",
  "cache_full",
  "image_invalid",
  "image_too_large",
  "image_timeout",
]);
const CONNECTION = new Set(["unsupported_protocol", "not_allowed"]);

/** Any failure: a stable `code`, one sentence, and where they are known the other fields. */
export class HearthError extends Error {
  constructor(code, message, { field, retry_after_s, usage } = {}) {
    super(message);
    this.code = code;
    this.field = field;
    this.retry_after_s = retry_after_s;
    this.usage = usage;
    this.text = "";
  }

  get name() {
    return this.constructor.name;
  }
}

/** The request must change before it can work. */
export class RequestRefused extends HearthError {
  kind = "request";
}

/** The request was fine and the service could not take or finish it. */
export class ServiceFailed extends HearthError {
  kind = "service";
}

/** The daemon cannot be reached, or the conversation with it broke. */
export class ConnectionFailed extends HearthError {
  kind = "connection";
}

/** The error that an answer of the daemon tells; an unknown code is a service's. */
export function errorFor({ code, message, ...rest }) {
  if (code === "hello_required") return new ConnectionFailed("connection_lost", message, rest);
  if (REQUEST.has(code)) return new RequestRefused(code, message, rest);
  if (CONNECTION.has(code)) return new ConnectionFailed(code, message, rest);
  return new ServiceFailed(code, message, rest);
}

/** One loss ends several requests: each gets an error of its own to add to. */
export function copyOf(error) {
  if (!(error instanceof HearthError)) return error;
  return new error.constructor(error.code, error.message, error);
}
