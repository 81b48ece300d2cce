// The event stream. One tab of the browser holds it for all of them, since a browser opens only six connections to a
// host. The tab that has the lock leads; when it closes, the browser gives the lock to the next one.
import { batch, effect, signal } from "../vendor.js";
import { reports, session } from "./api.js";

const SILENCE_MS = 8000;
const SAMPLES = 900;

export const connection = signal("connecting"); // connecting, live or lost
export const retryAt = signal(0);
export const tick = signal(null);
export const replicaChanges = signal(0);
export const isOutdated = signal(false);
// Readings since the page was opened, as columns for a chart. They are no state of a component: charts read them once a tick.
export const samples = { at: [], running: [], queued: [] };

let build = "";
let lastAt = 0;
const channel = "BroadcastChannel" in window ? new BroadcastChannel("argosy-console") : null;

function receive(name, data) {
  lastAt = Date.now();
  batch(() => {
    if (name === "hello") {
      isOutdated.value = build !== "" && build !== data.build;
      if (build) reports.value += 1;
      build ||= data.build;
    } else if (name === "tick") {
      connection.value = "live";
      if (data.running !== undefined) {
        for (const [key, value] of [["at", data.at], ["running", data.running], ["queued", data.queued]]) {
          samples[key].push(value);
          if (samples[key].length > SAMPLES) samples[key].shift();
        }
      }
      tick.value = data;
    } else if (name === "replica") {
      replicaChanges.value += 1;
      reports.value += 1;
    } else if (name === "session_ended") {
      session.value = null;
    }
  });
}

function lose(at) {
  connection.value = "lost";
  retryAt.value = at;
}

if (channel) channel.onmessage = ({ data }) => (data.lost ? lose(data.lost) : receive(data.name, data.data));

// Leads until the returned function is called.
function lead() {
  let source = null, timer = 0, wait = 500;
  const share = (message) => channel?.postMessage(message);
  const fail = () => {
    source?.close();
    const delay = wait * (0.5 + Math.random());
    wait = Math.min(wait * 2, 15000);
    lose(Date.now() + delay);
    share({ lost: Date.now() + delay });
    timer = setTimeout(open, delay);
  };
  const open = () => {
    source = new EventSource("console/events");
    for (const name of ["hello", "tick", "replica", "session_ended"]) {
      source.addEventListener(name, (event) => {
        wait = 500;
        const data = JSON.parse(event.data);
        receive(name, data);
        share({ name, data });
      });
    }
    source.onerror = fail;
  };
  // A dead connection raises no error.
  const watch = setInterval(() => {
    if (connection.value === "live" && Date.now() - lastAt > SILENCE_MS) fail();
  }, 1000);
  open();
  return () => { source?.close(); clearTimeout(timer); clearInterval(watch); };
}

effect(() => {
  if (!session.value) return undefined;
  const controller = new AbortController();
  let stop = () => {};
  const run = () => new Promise((resolve) => {
    const end = lead();
    stop = () => { end(); resolve(); };
  });
  if (navigator.locks) navigator.locks.request("argosy-console", { signal: controller.signal }, run).catch(() => {});
  else run();
  return () => { controller.abort(); stop(); };
});
