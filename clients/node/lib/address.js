import fs from "node:fs";
import net from "node:net";
import { ConnectionFailed } from "./errors.js";

const MAX_PATH_BYTES = 107;
const MAX_KEY_FILE_BYTES = 64 << 10;
const SYSTEM_PATH = "/run/hearth/hearth.sock";
const TCP = /^tcp:\/\/[^\s/]+:[0-9]{1,5}$/;
const KEY = /^\s*(public|secret|server)-key\s*=\s*["']?([0-9a-zA-Z.:+=^!/*?&<>()[\]{}@%$#-]{40})["']?\s*$/gm;

const fail = (code, message) => {
  throw new ConnectionFailed(code, message);
};

/**
 * The endpoint of ZeroMQ for a path, `ipc://PATH` or `tcp://HOST:PORT`, else for `$HEARTH_SOCKET`, else for
 * the first agreed place that exists. Throws ConnectionFailed.
 */
export function endpoint(address, environ = process.env) {
  const named = address || environ.HEARTH_SOCKET || agreedPath(environ.XDG_RUNTIME_DIR);
  if (TCP.test(named)) return named;
  const path = pathOf(named);
  if (path.includes("://")) fail("connection_refused", `${named} is no path, ipc://PATH or tcp://HOST:PORT`);
  const size = Buffer.byteLength(path);
  if (size > MAX_PATH_BYTES) {
    fail("connection_refused", `the socket path ${path} has ${size} bytes, ${MAX_PATH_BYTES} are possible`);
  }
  return `ipc://${path}`;
}

const pathOf = (named) => (named.startsWith("ipc://") ? named.slice("ipc://".length) : named);

function agreedPath(folder) {
  if (!folder) return SYSTEM_PATH;
  const own = `${folder}/hearth/hearth.sock`;
  return fs.existsSync(own) || !fs.existsSync(SYSTEM_PATH) ? own : SYSTEM_PATH;
}

/** Reason why no daemon can be reached at a local endpoint; undefined where one may, as a busy one. */
export async function absence(place) {
  if (!place.startsWith("ipc://")) return undefined;
  const path = pathOf(place);
  const probe = net.connect({ path });
  const code = await new Promise((resolve) => {
    probe.once("connect", () => resolve(undefined));
    probe.once("error", (error) => resolve(error.code));
  });
  probe.destroy();
  if (code === "EACCES") {
    return new ConnectionFailed("not_allowed", `not allowed to use ${path}: join the group that owns it`);
  }
  if (code === "ENOENT" || code === "ECONNREFUSED") {
    const why = code === "ENOENT" ? "there is no socket" : "nobody listens";
    return new ConnectionFailed("connection_refused", `no daemon at ${path} (${why}): start one with \`hearth serve\``);
  }
  return undefined;
}

/** ZeroMQ's options for a daemon at TCP, from the key file that its owner has made; throws ConnectionFailed. */
export function curveOptions(place, keyFile) {
  if (!place.startsWith("tcp://")) return {};
  if (!keyFile) fail("not_allowed", "a daemon at tcp:// wants a key: give keyFile, or $HEARTH_KEY");
  const keys = Object.fromEntries(Array.from(privateText(keyFile).matchAll(KEY), ([, name, key]) => [name, key]));
  for (const name of ["public", "secret", "server"]) {
    if (!keys[name]) fail("not_allowed", `${keyFile} has no ${name}-key of 40 characters`);
  }
  return { curvePublicKey: keys.public, curveSecretKey: keys.secret, curveServerKey: keys.server };
}

function privateText(keyFile) {
  let file;
  try {
    file = fs.openSync(keyFile, "r");
    const { mode } = fs.fstatSync(file);
    if (mode & 0o177) fail("not_allowed", `${keyFile} lets others at the keys: chmod 600 ${keyFile}`);
    const text = Buffer.alloc(MAX_KEY_FILE_BYTES);
    return text.toString("utf8", 0, fs.readSync(file, text, 0, text.length, 0));
  } catch (error) {
    if (error instanceof ConnectionFailed) throw error;
    return fail("not_allowed", `cannot read the key file ${keyFile}: ${error.code}`);
  } finally {
    if (file !== undefined) fs.closeSync(file);
  }
}
