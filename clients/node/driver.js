// Driver of ../conformance: commands on standard input, events on standard output.
import { createInterface } from "node:readline";
import { Client, HearthError } from "hearth-client";

const [address] = process.argv.slice(2);
const generations = new Map();
const work = new Set();
let client;

// JSON.parse rounds whole numbers of more than 53 bits; outside of texts they become BigInts here.
const LITERALS = /"(?:[^"\\]|\\.)*"|-?\d{16,}(?![\d.eE])/g;
const MARK = "\u0000bigint:";
const parse = (line) =>
  JSON.parse(
    line.replace(LITERALS, (found) => (found.startsWith('"') ? found : JSON.stringify(MARK + found))),
    (_, value) => (typeof value === "string" && value.startsWith(MARK) ? BigInt(value.slice(MARK.length)) : value),
  );

function tell(event, as, fields = {}) {
  const { t, id, seq, ...told } = fields;
  const written = JSON.stringify({ event, as, ...told }, function inBase64(name, value) {
    // A Buffer has been made an object of numbers by now.
    return Buffer.isBuffer(this[name]) ? this[name].toString("base64") : value;
  });
  process.stdout.write(`${written}\n`);
}

function fail(error, as) {
  if (!(error instanceof HearthError)) return tell("failed", as, { code: "", message: `${error}`, kind: "client" });
  const { code, message, kind, field, retry_after_s, usage } = error;
  return tell("failed", as, { code, message, kind, field, retry_after_s, usage });
}

function start(as, task) {
  const watched = task()
    .catch((error) => fail(error, as))
    .finally(() => work.delete(watched));
  work.add(watched);
}

const picture = ({ data, ...says }) => ({ ...says, data: Buffer.from(data, "base64") });

const part = (said) => {
  if (said.type === "image") return picture(said);
  return said.type === "video" ? { ...said, frames: said.frames.map(picture) } : said;
};

const withPictures = (request) =>
  request.messages
    ? {
        ...request,
        messages: request.messages.map((turn) =>
          Array.isArray(turn.content) ? { ...turn, content: turn.content.map(part) } : turn,
        ),
      }
    : request;

async function read(as) {
  const generation = generations.get(as);
  const accepted = await generation.accepted();
  if (accepted) tell("accepted", as, { prompt_tokens: accepted.prompt_tokens });
  for await (const delta of generation) tell("delta", as, delta);
  tell("done", as, generation.done);
}

const commands = {
  connect({ timeout_s: timeoutS, silence_s: silenceS, lease_s: leaseS, features, name }) {
    const options = { address, timeoutS, silenceS, leaseS, features, name };
    const last = client;
    // Without options it is the same client again, which opens another session.
    if (!last || Object.values(options).some((value) => value !== undefined && value !== address)) {
      client = new Client(options);
    }
    start(undefined, async () => {
      if (client !== last) await last?.close();
      tell("connected", undefined, { welcome: await client.connect() });
    });
  },
  generate({ as, request, read: reads = true }) {
    generations.set(as, client.generate(withPictures(request)));
    if (reads) start(as, () => read(as));
  },
  read: ({ as }) => start(as, () => read(as)),
  cancel: ({ as }) => generations.get(as)?.cancel(),
  tokenize: ({ as, request }) =>
    start(as, async () => tell("tokens", as, { tokens: await client.tokenize(withPictures(request)) })),
  detokenize: ({ as, request }) =>
    start(as, async () => tell("text", as, { text: await client.detokenize(request.tokens) })),
  status: ({ as }) => start(as, async () => tell("status_report", as, await client.status())),
};

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  const { do: command, ...fields } = parse(line);
  if (command === "close") break;
  client ??= new Client({ address });
  commands[command](fields);
}
await client?.close();
await Promise.all(work);
tell("closed");
process.stdin.destroy();
