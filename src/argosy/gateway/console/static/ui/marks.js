// Marks on charts for what changed in the fleet: deploys, failures of replicas and changes of the configuration.
import { html, signal, useEffect, useState } from "../vendor.js";
import { get, may, query } from "../core/api.js";
import { plural, time, visible } from "../core/format.js";
import { currentRange } from "./series.js";

const EVERY_MS = 30000;
const LIMIT = 1000;
const CLUSTER_PX = 14;
const SHAPES = { deploy: "▲", failure: "◆", change: "●" };
const DEPLOYS = { revision_in_force: "New plan", rollout_state: "Rollout" };
const BAD = ["ejected", "unreachable"];
const CONFIGURATION = ["limit.", "price.", "project.change"];

// One reading serves all charts, as long as one is shown. They share the time range.
const marks = signal([]);
let readers = 0, timer = 0, readRange = "";

export function useMarks() {
  const { id, start, end } = currentRange();
  const range = start ? `${start}-${end}` : id;
  useEffect(() => {
    readers += 1;
    return () => {
      readers -= 1;
      if (readers) return;
      clearTimeout(timer);
      readRange = "";
    };
  }, []);
  useEffect(() => {
    if (range === readRange) return;
    readRange = range;
    marks.value = [];
    read();
  }, [range]);
  return marks.value;
}

async function read() {
  clearTimeout(timer);
  const range = readRange, { seconds, start, end } = currentRange(), now = Date.now() / 1000;
  if (!document.hidden && may("viewer", "gateway")) {
    const common = { since: start ?? Math.floor(now - seconds), until: end, limit: LIMIT };
    const readAll = (path, filter) => get(query(path, { ...common, ...filter })).then(({ data }) => data, () => []);
    const [replicas, deploys, failures, audit] = await Promise.all([
      readAll("admin/replicas/events"), readAll("admin/events", { kind: Object.keys(DEPLOYS) }), readAll("admin/events", { kind: "replica_phase", outcome: "failed" }), readAll("admin/audit", { action: CONFIGURATION }),
    ]);
    if (range !== readRange) return;
    const found = [...replicas.map(fromReplica), ...[...deploys, ...failures].map(fromFleet), ...audit.map(fromAudit)].filter(Boolean).sort((a, b) => a.at - b.at);
    if (found.length !== marks.value.length || found.at(-1)?.at !== marks.value.at(-1)?.at) marks.value = found;
  }
  if (readers && !(end < now)) timer = setTimeout(read, EVERY_MS);
}

const sentence = (...parts) => parts.filter(Boolean).map(visible).join(" ");

function fromReplica({ at, replica, action, actor, status, previous, reason }) {
  if (action) return { at, kind: "change", text: sentence(replica, `was set to ${action} by ${actor}.`, reason) };
  if (BAD.includes(status)) return { at, kind: "failure", text: sentence(replica, `is ${status}.`, reason) };
  return status === "ready" && BAD.includes(previous) ? { at, kind: "failure", text: sentence(replica, "is ready again.") } : null;
}

function fromFleet({ at, kind, pool, replica, reason, outcome }) {
  if (kind === "replica_phase") return { at, kind: "failure", text: sentence(replica, "failed.", reason) };
  return { at, kind: "deploy", text: sentence(`${DEPLOYS[kind]}:`, pool, replica, outcome, reason) };
}

const fromAudit = ({ at, action, actor, subject }) => ({ at, kind: "change", text: sentence(action, subject, "by", actor) });

// Marks near each other share a button. `area` is the place of the plot: { left, width, start, end }.
function clusterMarks(shown, { left, width, start, end }) {
  const clusters = [];
  for (const mark of shown) {
    const x = left + ((mark.at - start) / (end - start)) * width;
    const last = clusters.at(-1);
    if (last && x - last.x < CLUSTER_PX) last.marks.push(mark);
    else clusters.push({ x, marks: [mark] });
  }
  return clusters;
}

export const describeMark = ({ at, text }) => `${time(at, { date: true })} ${text}`;

// Buttons above the plot. The arrow keys move between them, so that they are one stop for the tabulator.
export function MarkButtons({ marks: all, area }) {
  const [shown, setShown] = useState(null);
  if (!area) return null;
  const clusters = clusterMarks(all.filter(({ at }) => at >= area.start && at <= area.end), area);
  const move = (event) => {
    const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    const next = step && event.target[step];
    if (next?.matches("button")) next.focus();
  };
  const text = (cluster) => cluster.marks.slice(-4).map(describeMark).join("; ") + (cluster.marks.length > 4 ? `; and ${cluster.marks.length - 4} before` : "");
  const chosen = clusters[shown];
  return html`<div class="marks" role="group" aria-label="Changes" onKeyDown=${move}>${clusters.map((cluster, index) => html`
    <button key=${index} type="button" class=${cluster.marks.at(-1).kind} tabindex=${index ? -1 : 0} aria-label=${text(cluster)} style=${{ left: `${cluster.x}px` }}
      onMouseEnter=${() => setShown(index)} onMouseLeave=${() => setShown(null)} onFocus=${() => setShown(index)} onBlur=${() => setShown(null)}>${SHAPES[cluster.marks.at(-1).kind]}</button>`)}
    ${chosen ? html`<div class="tip" style=${chosen.x > area.left + area.width / 2 ? { right: `calc(100% - ${chosen.x}px)` } : { left: `${chosen.x}px` }}>${chosen.marks.slice(-4).map((mark, index) => html`<div key=${index}>${describeMark(mark)}</div>`)}</div>` : null}</div>`;
}

export function MarkList({ marks: all, area }) {
  const shown = area ? all.filter(({ at }) => at >= area.start && at <= area.end) : [];
  if (!shown.length) return null;
  return html`<details class="s"><summary>${plural(shown.length, "change")} in this time</summary><ul>${shown.slice(-50).reverse().map((mark, index) => html`
    <li key=${index}><span aria-hidden="true">${SHAPES[mark.kind]}</span> ${describeMark(mark)}</li>`)}</ul></details>`;
}
