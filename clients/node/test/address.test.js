import assert from "node:assert/strict";
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { test } from "node:test";
import { curveOptions, endpoint } from "../lib/address.js";

const folder = mkdtempSync(`${tmpdir()}/hearth-`);
test.after(() => rmSync(folder, { recursive: true }));

for (const [name, address, environ, want] of [
  ["a path", "/a/b", {}, "ipc:///a/b"],
  ["an endpoint", "ipc:///a/b", { HEARTH_SOCKET: "/c" }, "ipc:///a/b"],
  ["a relative path", "b", {}, "ipc://b"],
  ["the variable", undefined, { HEARTH_SOCKET: "/c", XDG_RUNTIME_DIR: folder }, "ipc:///c"],
  ["the variable as an endpoint", undefined, { HEARTH_SOCKET: "ipc:///c" }, "ipc:///c"],
  ["TCP", "tcp://127.0.0.1:7700", {}, "tcp://127.0.0.1:7700"],
  ["no folder of the user's", undefined, {}, "ipc:///run/hearth/hearth.sock"],
]) {
  test(`address: ${name}`, () => assert.equal(endpoint(address, environ), want));
}

test("address: the user's own socket", () => {
  mkdirSync(`${folder}/hearth`);
  writeFileSync(`${folder}/hearth/hearth.sock`, "");
  assert.equal(endpoint(undefined, { XDG_RUNTIME_DIR: folder }), `ipc://${folder}/hearth/hearth.sock`);
});

test("address: 107 bytes and not one more, as UTF-8", () => {
  assert.equal(endpoint(`${"ä".repeat(53)}x`, {}).length, "ipc://".length + 54);
  assert.throws(() => endpoint("ä".repeat(54), {}), { name: "ConnectionFailed" });
});

for (const address of ["http://host", "tcp://host"]) {
  test(`no address: ${address}`, () => assert.throws(() => endpoint(address, {}), { code: "connection_refused" }));
}

const key = (sign) => sign.repeat(40);
const certificate = (...names) => names.map((name, i) => `    ${name}-key = "${key("abc"[i])}"\n`).join("");

test("keys of a certificate", () => {
  const file = `${folder}/robot.key_secret`;
  writeFileSync(file, `metadata\n${certificate("server")}curve\n${certificate("public", "secret")}`, { mode: 0o600 });
  const want = { curveServerKey: key("a"), curvePublicKey: key("a"), curveSecretKey: key("b") };
  assert.deepEqual(curveOptions("tcp://127.0.0.1:1", file), want);
  assert.deepEqual(curveOptions("ipc:///a", file), {});
  chmodSync(file, 0o640);
  assert.throws(() => curveOptions("tcp://127.0.0.1:1", file), /chmod 600/);
});

for (const [name, text] of [
  ["without a secret key", certificate("public", "server")],
  ["with a short key", `${certificate("public", "server")} secret-key = "short"`],
]) {
  test(`no keys: a file ${name}`, () => {
    const file = `${folder}/none`;
    writeFileSync(file, text, { mode: 0o600 });
    assert.throws(() => curveOptions("tcp://127.0.0.1:1", file), { code: "not_allowed" });
  });
}

for (const file of [undefined, `${folder}/absent`]) {
  test(`no keys: ${file ? "no such file" : "none given"}`, () =>
    assert.throws(() => curveOptions("tcp://127.0.0.1:1", file), { code: "not_allowed" }));
}
