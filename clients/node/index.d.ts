/** Seconds, as the protocol counts them. */
type Seconds = number;

/** Text that may be one of `Known`, or a word of a later server. */
type Word<Known extends string> = Known | (string & {});

export interface ClientOptions {
  /** A path, `ipc://PATH` or `tcp://HOST:PORT`; default `$HEARTH_SOCKET`, else the agreed place. */
  address?: string;
  /** Key file for a daemon at TCP, from `hearth keys add`; default `$HEARTH_KEY`. */
  keyFile?: string;
  /** Name for the daemon's logs, of 128 characters at most. */
  name?: string;
  /** Wait for the daemon's welcome at most, and after a loss for the daemon to come back. Default 5. */
  timeoutS?: Seconds;
  /** Silence of the daemon that counts as a loss. Default 5. */
  silenceS?: Seconds;
  /** Lease to ask for; default the daemon's. */
  leaseS?: Seconds;
  /** Names of what the client reads beyond the first version; default `FEATURES`. */
  features?: readonly Word<Feature>[];
  /** Whether the client asks for `status` alone. */
  statusOnly?: boolean;
}

export type Feature = "reasoning" | "tool_calls" | "end_details" | "token_bytes" | "generation_defaults";

export interface CallOptions {
  /** Ends the request, which then fails with the signal's reason. */
  signal?: AbortSignal;
}

// --- requests -------------------------------------------------------------------------------

export type RawEncoding =
  | "rgb8" | "bgr8" | "rgba8" | "bgra8" | "mono8" | "8UC1" | "8UC3" | "8UC4"
  | "bayer_rggb8" | "bayer_bggr8" | "bayer_gbrg8" | "bayer_grbg8"
  | "yuv422" | "uyvy" | "yuv422_yuy2" | "yuyv" | "nv12";

/** A picture: the bytes of a file, or raw pixels. The bytes are not to be changed before `accepted`. */
export type Picture =
  | { data: Uint8Array; format: "jpeg" | "png" | "webp" | "gif" }
  | { data: Uint8Array; encoding: RawEncoding; width: number; height: number; step?: number };

export type Part =
  | { type: "text"; text: string }
  | ({ type: "image" } & Picture)
  | { type: "video"; frames: (Picture & { time_s: number })[] };

export interface ToolCall {
  id: string;
  name: string;
  arguments?: Record<string, unknown>;
}

export interface Message {
  role: "system" | "developer" | "user" | "assistant" | "tool";
  content?: string | Part[] | null;
  reasoning?: string;
  tool_calls?: ToolCall[];
  tool_call_id?: string;
  name?: string;
}

export interface Tool {
  name: string;
  description?: string;
  /** A JSON schema of the arguments. */
  parameters?: Record<string, unknown>;
  strict?: boolean;
}

export type ResponseFormat =
  | { type: "json_object" }
  | { type: "json_schema"; schema: Record<string, unknown> | boolean }
  | { type: "regex"; regex: string }
  | { type: "lark"; grammar: string };

interface Conversation {
  messages: Message[];
  tools?: Tool[];
  tool_choice?: "auto" | "none" | "required" | { name: string };
  parallel_tool_calls?: boolean;
  /** Variables of the chat template. */
  template?: Record<string, boolean | number | string | null>;
}

interface Options {
  max_tokens?: number;
  temperature?: number;
  top_k?: number;
  top_p?: number;
  min_p?: number;
  repetition_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  logit_bias?: [token: number, bias: number][];
  /** 0 to 2^63 - 1; above 2^53 as a BigInt. */
  seed?: number | bigint;
  stop?: string[];
  logprobs?: number;
  ignore_eos?: boolean;
  priority?: number;
  deadline_s?: Seconds;
  timestamps?: boolean;
  speculation?: boolean;
  adapter?: string;
  cache?: "use" | "bypass" | "pin";
  cache_salt?: string;
  traceparent?: string;
  response_format?: ResponseFormat;
  n?: number;
}

/** Fields of `generate` in PROTOCOL.md, by their names there. */
export type GenerateRequest =
  | (Options & { prompt: string; messages?: undefined })
  | (Options & Conversation & { prompt?: undefined; reasoning_budget?: number });

export type TokenizeRequest = { text: string; messages?: undefined } | (Conversation & { text?: undefined });

// --- answers --------------------------------------------------------------------------------

export interface Limits {
  frame_bytes: number;
  frames: number;
  requests_per_client: number;
  prompt_tokens: number;
  total_tokens: number;
  queued_requests: number;
  queued_tokens: number;
  lease_s: Seconds;
  images?: number;
  image_bytes?: number;
  request_image_bytes?: number;
  image_tokens?: number;
}

export interface Welcome {
  proto: number;
  server: string;
  limits: Limits;
  features?: string[];
  model?: string;
  epoch?: string;
  adapters?: string[];
  tool_format?: string;
}

export interface Accepted {
  prompt_tokens: number;
  /** The request's id in the daemon's logs and traces. */
  request?: string;
}

export interface TokenLogprob {
  logprob: number;
  top?: [token: number, logprob: number][];
  token_bytes?: Uint8Array;
  top_bytes?: Uint8Array[];
}

export interface Delta {
  seq: number;
  text: string;
  tokens?: number[];
  logprobs?: TokenLogprob[];
  /** Seconds of the system's monotonic clock. */
  ended?: Seconds;
  reasoning?: string;
  tool_calls?: { index: number; id?: string; name?: string; arguments?: string }[];
  /** The reply that this is of; left out for the first one. */
  choice?: number;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  /** Of the completion, with the feature `reasoning`. */
  reasoning_tokens?: number;
  cached_tokens?: number;
  queue_ms?: number;
  prefill_ms?: number;
  decode_ms?: number;
}

export interface Speculation {
  rounds: number;
  drafted: number;
  accepted: number;
  accept_length: number;
}

export interface Done {
  reason: Word<"stop" | "length" | "cancelled" | "tool_calls">;
  usage: Usage;
  images?: {
    count: number;
    tokens: number;
    cached?: number;
    sizes?: [width: number, height: number][];
    decode_ms?: number;
    resize_ms?: number;
    engine_ms?: number;
  };
  speculation?: Speculation;
  stop?: string;
  choices?: { reason: string; completion_tokens: number; stop?: string }[];
}

interface Stage {
  steps: number;
  tokens: number;
  seconds: Seconds;
}

export interface StatusReport {
  server: string;
  model: string;
  state: Word<"starting" | "loading" | "ready" | "draining" | "failed">;
  stage?: Word<"verifying" | "opening" | "compiling" | "capturing" | "answering">;
  share?: number;
  reason?: string;
  uptime_s: Seconds;
  clients: number;
  running: number;
  queued: number;
  queued_tokens: number;
  places?: number;
  totals?: Record<string, number>;
  engine?: Record<string, string | number>;
  adapters?: string[];
  executor?: {
    prefill: Stage;
    generation: Stage;
    adapter?: string;
    switches?: number;
    prefix?: { rows: number; hits: number; queried: number; reused: number; bytes?: Record<string, number> };
    images?: { images: number; tokens: number; merge_seconds: Seconds; encoded: number; encode_seconds: Seconds };
    speculation?: Speculation & {
      steps: number;
      accepted_by_position: number[];
      draft_s: Seconds;
      verify_s: Seconds;
      commit_s: Seconds;
    };
  };
}

// --- the client -----------------------------------------------------------------------------

/** Features of the protocol that a client has unless it is told others. */
export const FEATURES: readonly Feature[];

/**
 * A client of the daemon. It opens a session with the first request, keeps its lease by the clock, and opens
 * another one with the next request after a loss. It keeps the program alive until `close`.
 */
export class Client {
  constructor(options?: ClientOptions);
  /** Open a session, unless one is open. */
  connect(): Promise<Welcome>;
  /** Ask for text; what is wrong with the request is thrown where the generation is read. */
  generate(request: GenerateRequest, options?: CallOptions): Generation;
  /** Token ids of a text or a conversation. */
  tokenize(request: TokenizeRequest, options?: CallOptions): Promise<number[]>;
  /** Text of token ids. */
  detokenize(tokens: number[], options?: CallOptions): Promise<string>;
  /** State of the daemon. */
  status(options?: CallOptions): Promise<StatusReport>;
  /** Leave: what is open fails with `client_closed`. */
  close(): Promise<void>;
}

/** One reply as far as it has been read. */
export class Reply {
  private constructor();
  readonly text: string;
  readonly reasoning: string;
  readonly tokens: readonly number[];
  /** The calls that are whole: the last one of a reply may have been cut. */
  readonly toolCalls: ToolCall[];
  /** The turn to append to the conversation; throws RequestRefused `reply_empty` where it is none. */
  message(): Message;
}

/**
 * A generation and its stream, for one reader. Leaving `for await` early cancels it. A failure is thrown where it
 * is read, as a HearthError with the text so far, or as the reason of the signal that aborted it.
 */
export class Generation implements AsyncIterable<Delta> {
  private constructor();
  [Symbol.asyncIterator](): AsyncIterator<Delta, undefined>;
  /** The request's id on its connection. */
  readonly id: string;
  /** Reason and usage; undefined before the end, and after a failure. */
  readonly done: Done | undefined;
  readonly reasoning: string;
  readonly tokens: readonly number[];
  readonly toolCalls: ToolCall[];
  /** All replies that have begun; one unless the request had another `n`. */
  readonly choices: Reply[];
  /** Wait until the request is queued; undefined where it began or ended without a word of that. */
  accepted(): Promise<Accepted | undefined>;
  /** Read to the end; returns the text. */
  text(): Promise<string>;
  /** Read to the end; returns the turn to append to the conversation. */
  message(): Promise<Message>;
  /** Read to the end; returns reason and usage. */
  result(): Promise<Done>;
  /** End the generation: its stream ends with the reason `cancelled`. Does nothing after its end. */
  cancel(): void;
}

// --- errors ---------------------------------------------------------------------------------

/** Any failure: a stable `code` of PROTOCOL.md or the client's own, one sentence, and what is known beside. */
export abstract class HearthError extends Error {
  readonly code: string;
  readonly kind: "request" | "service" | "connection";
  /** The field at fault, as `messages[0].role`. */
  readonly field?: string;
  /** Where waiting helps: seconds after which there should be room. */
  readonly retry_after_s?: Seconds;
  /** What had come of a reply before it failed. */
  readonly text: string;
  /** What it had taken until then. */
  readonly usage?: Usage;
}

/** The request must change before it can work. */
export class RequestRefused extends HearthError {
  readonly kind: "request";
}

/** The request was fine and the service could not take or finish it. */
export class ServiceFailed extends HearthError {
  readonly kind: "service";
}

/** The daemon cannot be reached, or the conversation with it broke. */
export class ConnectionFailed extends HearthError {
  readonly kind: "connection";
}
