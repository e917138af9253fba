import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import * as client from "hearth-client";

const read = (name) => readFileSync(new URL(`../${name}`, import.meta.url), "utf8");

test("the types declare what the module has", () => {
  const declared = read("index.d.ts").matchAll(/^export (?:abstract )?(?:class|const) (\w+)/gm);
  assert.deepEqual(Array.from(declared, ([, name]) => name).sort(), Object.keys(client).sort());
});

test("the README's program is the example", () => {
  assert.equal(/^```js\n(.*?)^```$/ms.exec(read("README.md"))[1], read("example.js"));
});

test("the daemon's manifest has the same version", () => {
  const { version } = JSON.parse(read("package.json"));
  assert.equal(/^version = "(.*)"$/m.exec(read("../python/pyproject.toml"))[1], version);
});
