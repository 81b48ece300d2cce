// The address is the only store of what a screen shows: `#/screen/part?name=value`. The part after `#` works below any
// path of a reverse proxy, and no address collides with a path of the API.
import { computed, signal } from "../vendor.js";

const address = signal(location.hash);
addEventListener("hashchange", () => { address.value = location.hash; });

export const route = computed(() => {
  const [path, query = ""] = address.value.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decode);
  return { screen: parts[0] || "overview", parts: parts.slice(1), query: Object.fromEntries(new URLSearchParams(query)) };
});

function decode(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

// Returns the address of a screen.
export function link(screen, parts = [], query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return `#/${[screen, ...parts].map(encodeURIComponent).join("/")}${search}`;
}

// Changes parameters of the present address. It replaces the entry of the history, so that "back" leaves the screen.
export function setQuery(changes) {
  const { screen, parts, query } = route.value;
  history.replaceState(null, "", link(screen, parts, { ...query, ...changes }));
  address.value = location.hash;
}
