import { existsSync, readFileSync } from "node:fs";

const pathOf = (name) => new URL(`../../vectors/${name}`, import.meta.url);

/** The vectors of a file, with whole numbers of more than 53 bits as BigInts. */
export function vectors(name) {
  const exact = readFileSync(pathOf(name), "utf8").replace(/"(?:[^"\\]|\\.)*"|-?\d{16,}(?![\d.eE])/g, (found) =>
    found.startsWith('"') ? found : `"bigint:${found}"`,
  );
  return JSON.parse(exact, (_, value) =>
    typeof value === "string" && value.startsWith("bigint:") ? BigInt(value.slice("bigint:".length)) : value,
  );
}

export const hasVectors = (name) => existsSync(pathOf(name));

export const bytes = (hex) => Buffer.from(hex, "hex");
