// Numbers, durations and times as text. A value that is missing is a dash, never zero.
import { clock, offset } from "./time-zone.js";

export const MISSING = "–";
const isMissing = (value) => value === undefined || value === null || Number.isNaN(value);

export function count(value) {
  if (isMissing(value)) return MISSING;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size * 0.99995) return `${significant(value / size)} ${unit}`;
  }
  return significant(value);
}

export const exact = (value) => (isMissing(value) ? MISSING : value.toLocaleString("en", { maximumFractionDigits: 3 }).replaceAll(",", "\u202f"));

export function significant(value, digits = 3) {
  if (isMissing(value)) return MISSING;
  if (value === 0) return "0";
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return String(Number(value.toFixed(Math.min(decimals, 20))));
}

export function duration(seconds) {
  if (isMissing(seconds)) return MISSING;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${significant(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${significant(seconds * 1e3)} ms`;
  if (seconds < 60) return `${significant(seconds)} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

export function percent(ratio) {
  if (isMissing(ratio)) return MISSING;
  const value = ratio * 100;
  return `${value < 10 ? Number(value.toFixed(1)) : Math.round(value)} %`;
}

export function bytes(value) {
  if (isMissing(value)) return MISSING;
  const [size, unit] = value >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${significant(value / size)} ${unit}`;
}

export function money(nanoDollars) {
  if (isMissing(nanoDollars)) return MISSING;
  const dollars = nanoDollars / 1e9;
  if (dollars === 0) return "$0.00";
  return Math.abs(dollars) < 0.01 ? `$${significant(dollars, 2)}` : `$${dollars.toFixed(2).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f")}`;
}

// Times of the chosen zone in an order that all readers know.
export function time(seconds, { date = false } = {}) {
  if (isMissing(seconds)) return MISSING;
  const text = clock(seconds).replace("T", " ");
  return date ? text : text.slice(11);
}

// ISO 8601 with the offset of the chosen zone, for files.
export const isoTime = (seconds) => (isMissing(seconds) ? "" : clock(seconds) + offset(seconds));

export const age = (seconds) => (isMissing(seconds) ? MISSING : `${duration(Math.max(0, Math.round(Date.now() / 1000 - seconds)))} ago`);

// Shows characters that change the direction of text or that cannot be seen, so that no name looks like another one.
export const visible = (text) => String(text ?? "").replace(
  /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
  (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
);

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const partOf = (number, total, noun) => `${count(number)} of ${plural(total, noun)}`;

// Digests of versions are shown by their beginnings, as the command line does.
export const shortDigests = (text) => visible(text).replace(/\b[0-9a-f]{64}\b/g, (digest) => digest.slice(0, 12));
