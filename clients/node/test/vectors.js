import { readFileSync } from "node:fs";

/** The vectors of a file, with whole numbers of more than 53 bits as BigInts. */
export function vectors(name) {
  const text = readFileSync(new URL(`../../vectors/${name}`, import.meta.url), "utf8");
  const exact = text.replace(/"(?:[^"\\]|\\.)*"|-?\d{16,}(?![\d.eE])/g, (found) =>
    found.startsWith('"') ? found : `"bigint:${found}"`,
  );
  return JSON.parse(exact, (_, value) =>
    typeof value === "string" && value.startsWith("bigint:") ? BigInt(value.slice("bigint:".length)) : value,
  );
}

export const bytes = (hex) => Buffer.from(hex, "hex");
