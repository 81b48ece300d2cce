// Events and audit: what changed in accounts and decisions, and whether the log is complete.
import { html } from "../vendor.js";
import { get, may, query } from "../core/api.js";
import { exact, time, visible } from "../core/format.js";
import { PAGE_ROWS, usePages } from "../core/pages.js";
import { route, setQuery } from "../core/router.js";
import { useNames } from "../ui/names.js";
import { Action, Card, Field, Resource, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

export default function Events() {
  const { query: { subject } } = route.value;
  const names = useNames();
  const { rows, pages, ...first } = usePages(query("admin/audit", { subject: names.find(subject), limit: PAGE_ROWS }), (row) => row.entry);
  const verify = async () => {
    const verdict = await get("admin/audit/verify");
    notify(verdict.problem ? `The log is damaged: ${verdict.problem}` : verdict.entries === 1 ? "The only entry is there and unaltered." : `All ${exact(verdict.entries)} entries are there and unaltered.`, verdict.problem ? "bad" : "ok");
  };
  return html`<${Card} title="Audit log" note="account changes and decisions, newest first" actions=${may("viewer", "gateway") ? html`<${Action} run=${verify}>Verify<//>` : null}>
    <div class="row"><${Field} label="Changed record, name or id"><input value=${subject ?? ""} onChange=${(event) => setQuery({ subject: event.target.value.trim() })} /><//></div>
    <${Resource} of=${first} isEmpty=${() => rows.length === 0} empty=${subject ? "No change of this record is in the log." : "Nothing was changed yet. Keys, limits, prices and decisions about replicas appear here."}>
      ${() => html`<${Table} label="Audit log" columns=${columns(names)} rows=${rows} rowKey=${(row) => row.entry} csv="audit.csv" pages=${pages} />`}<//><//>`;
}

// Details as "name: old → new", which is how a change is read.
const describe = (details, names) => Object.entries(details).map(([name, value]) => `${name}: ${Array.isArray(value) && value.length === 2 ? `${show(name, value[0], names)} → ${show(name, value[1], names)}` : show(name, value, names)}`).join("; ");
const show = (name, value, names) => {
  if (typeof value === "number" && (name === "since" || name.endsWith("_at"))) return time(value, { date: true });
  return typeof value === "string" ? visible(names(value)) : JSON.stringify(value);
};
// An actor is a name, or "key:ID" or "user:ID".
const whoOf = (actor, names) => { const [kind, id] = actor.split(":", 2); return id && names(id) !== id ? `${kind} ${names(id)}` : actor; };

const columns = (names) => [
  timeColumn("at", "Time"),
  { key: "entry", label: "Entry", isNumber: true, value: (row) => row.entry },
  { key: "action", label: "Action", value: (row) => row.action },
  { key: "actor", label: "By", value: (row) => whoOf(row.actor, names), cell: (row) => html`<span title=${row.actor}>${visible(whoOf(row.actor, names))}</span>` },
  { key: "subject", label: "Record", value: (row) => names(row.subject), cell: (row) => html`<span title=${row.subject}>${visible(names(row.subject))}</span>` },
  { key: "details", label: "Change", value: (row) => describe(row.details, names), cell: (row) => html`<span title=${describe(row.details, names)}>${describe(row.details, names)}</span>` },
];
