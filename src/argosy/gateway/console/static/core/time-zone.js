// Times in UTC or in the browser's zone. The choice is remembered.
import { signal } from "../vendor.js";

export const isUtc = signal(localStorage.getItem("argosy-times") === "utc");

export function toggleUtc() {
  isUtc.value = !isUtc.value;
  localStorage.setItem("argosy-times", isUtc.value ? "utc" : "local");
}

const offsetMinutes = (at) => (isUtc.value ? 0 : -at.getTimezoneOffset());

// "2026-11-27T12:00:00", by the clock of the chosen zone.
export function clock(seconds) {
  const at = new Date(seconds * 1000);
  return new Date(at.getTime() + offsetMinutes(at) * 60000).toISOString().slice(0, 19);
}

// "Z" or "+01:00", which may change within a year.
export function offset(seconds) {
  if (isUtc.value) return "Z";
  const minutes = offsetMinutes(new Date(seconds * 1000)), size = Math.abs(minutes);
  return `${minutes < 0 ? "-" : "+"}${String(Math.floor(size / 60)).padStart(2, "0")}:${String(size % 60).padStart(2, "0")}`;
}

export const zoneName = () => (isUtc.value ? "UTC" : `UTC${offset(Date.now() / 1000)}`);

// Seconds since the epoch of a time that a person entered, as `clock` writes it.
export const parseClock = (text) => new Date(isUtc.value ? `${text}Z` : text).getTime() / 1000;

// The last midnight by the chosen clock.
export const startOfDay = () => parseClock(`${clock(Date.now() / 1000).slice(0, 10)}T00:00:00`);
