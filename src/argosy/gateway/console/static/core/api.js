// Requests to the gateway, and resources that screens show.
import { signal, useEffect, useRef, useState } from "../vendor.js";

export const session = signal(undefined); // undefined while it is read, null without one
export const reports = signal(0); // reports of the event stream that something may exist by now: the gateway restarted, or a replica changed

const ACCEPTED = "application/vnd.argosy.columns+json, application/json";

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message ?? `The gateway answered with status ${status}.`);
    this.status = status;
    this.code = error.code ?? "";
  }
}

export async function call(method, path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
      method, signal, cache: "no-store",
      headers: { accept: ACCEPTED, ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The gateway does not answer. It may be restarting, or the network is down.", code: "unreachable" });
  }
  if (!response.ok) {
    const error = await response.json().then((answer) => answer.error ?? {}, () => ({}));
    if (response.status === 401 && path !== "console/session") session.value = null;
    throw new ApiError(response.status, error);
  }
  return response;
}

const BUSY_WAIT_MS = 2000;

// Reads a path. A gateway that is too busy for the console is asked again, twice.
export async function get(path, signal, tries = 3) {
  try {
    const answer = await (await call("GET", path, undefined, signal)).json();
    return answer.columns ? { ...answer, data: toRows(answer.columns) } : answer;
  } catch (error) {
    if (error.code !== "overloaded" || tries <= 1) throw error;
    await new Promise((resolve) => setTimeout(resolve, BUSY_WAIT_MS));
    signal?.throwIfAborted();
    return get(path, signal, tries - 1);
  }
}

// Lists come as columns, which take a third of the bytes.
function toRows(columns) {
  const names = Object.keys(columns);
  return (columns[names[0]] ?? []).map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
}

export const post = async (path, body = {}) => (await call("POST", path, body)).json();

export function query(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

// Reads a path of the API, again every `every` milliseconds while the page is visible. A new path aborts the request
// before. After an error the last data stays, with the time when it was read. What does not exist is read again after a
// report of the event stream. A path that moves with the time is built by `build` for each reading; `path` then only names
// the resource.
export function useResource(path, every = 0, build = () => path) {
  const [state, setState] = useState({ path, data: undefined, error: null, at: 0 });
  const [round, setRound] = useState(0);
  const failures = useRef(0);
  useEffect(() => {
    if (!path) return undefined;
    const controller = new AbortController();
    let timer = 0, unsubscribe = () => {};
    const readAfterReport = (seen) => {
      if (reports.peek() === seen) unsubscribe = reports.subscribe((count) => { if (count !== seen) { unsubscribe(); read(); } });
      else read();
    };
    const read = async () => {
      const seen = reports.peek();
      let isMissing = false;
      try {
        const data = await get(build(), controller.signal);
        failures.current = 0;
        setState({ path, data, error: null, at: Date.now() });
      } catch (error) {
        if (error.name === "AbortError") return;
        failures.current += 1;
        isMissing = error.status === 404;
        setState((before) => ({ path, data: before.path === path ? before.data : undefined, error, at: before.at }));
      }
      if (!every || controller.signal.aborted) return;
      if (isMissing) readAfterReport(seen);
      else timer = setTimeout(wait, every * Math.min(2 ** failures.current, 16));
    };
    const wait = () => {
      if (!document.hidden) return read();
      document.addEventListener("visibilitychange", read, { once: true, signal: controller.signal });
      return undefined;
    };
    read();
    return () => { controller.abort(); clearTimeout(timer); unsubscribe(); };
  }, [path, every, round]);
  const current = state.path === path ? state : { data: undefined, error: null, at: 0 };
  return { ...current, tries: failures.current, reload: () => setRound((value) => value + 1) };
}

const ranks = ["user", "viewer", "operator", "admin"];

// Whether the caller's role suffices. The gateway decides; this only leaves out what it would refuse.
export function may(role, scope = "organisation") {
  const who = session.value;
  return Boolean(who) && ranks.indexOf(who.role) >= ranks.indexOf(role)
    && (scope === "organisation" || who.scope === "gateway" || role === "user");
}
