import { readFileSync } from "node:fs";

/** The vectors of a file, with whole numbers of more than 53 bits as BigInts. */
export function vectors(name) {
  const text = readFileSync(new URL(`../../vectors/${name}`, import.meta.url), "utf8");
  const exact = text.replace(/"(?:[^"\\]|\\.)*"|-?\d{16,}(?![\d.eE])/g, (found) =>
    found.startsWith('"') ? found : `"bigint:${found}"`,
  );
  return JSON.parse(exact, (_, value) =>
    typeof value === "string" && value.startsWith("bigint:") ? narrow(BigInt(value.slice("bigint:".length))) : value,
  );
}

const narrow = (number) => (Number.isSafeInteger(Number(number)) ? Number(number) : number);

/** A value whose whole numbers of at most 53 bits are none of BigInt, in whatever head they came. */
export function narrowed(value) {
  if (typeof value === "bigint") return narrow(value);
  if (Array.isArray(value)) return value.map(narrowed);
  if (value === null || typeof value !== "object" || value instanceof Uint8Array) return value;
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, narrowed(one)]));
}

export const bytes = (hex) => Buffer.from(hex, "hex");
