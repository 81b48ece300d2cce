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
  const { find } = useNames();
  const { rows, pages, ...first } = usePages(query("admin/audit", { subject: find(subject), limit: PAGE_ROWS }), (row) => row.entry);
  const verify = async () => {
    const verdict = await get("admin/audit/verify");
    notify(verdict.problem ? `The log is damaged: ${verdict.problem}` : verdict.entries === 1 ? "The only entry is there and unaltered." : `All ${exact(verdict.entries)} entries are there and unaltered.`, verdict.problem ? "bad" : "ok");
  };
  return html`<${Card} title="Audit log" note="account changes and decisions, newest first" actions=${may("viewer", "gateway") ? html`<${Action} run=${verify}>Verify<//>` : null}>
    <div class="row"><${Field} label="Changed record, name or id"><input value=${subject ?? ""} onChange=${(event) => setQuery({ subject: event.target.value.trim() })} /><//></div>
    <${Resource} of=${first} isEmpty=${() => rows.length === 0} empty=${subject ? "No change of this record is in the log." : "Nothing was changed yet. Keys, limits, prices and decisions about replicas appear here."}>
      ${() => html`<${Table} label="Audit log" columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.entry} csv="audit.csv" pages=${pages} />`}<//><//>`;
}

// Details as "name: old → new", which is how a change is read.
const describe = (row) => Object.entries(row.details).map(([name, value]) => `${name}: ${Array.isArray(value) && value.length === 2 ? `${show(name, value[0], row)} → ${show(name, value[1], row)}` : show(name, value, row)}`).join("; ");
const show = (name, value, row) => {
  if (typeof value === "number" && (name === "since" || name.endsWith("_at"))) return time(value, { date: true });
  return typeof value === "string" ? visible(row.names[value] ?? value) : JSON.stringify(value);
};
// An actor is a name, or "key:ID" or "user:ID".
const whoOf = ({ actor, names }) => { const [kind, id] = actor.split(":", 2); return names[id] ? `${kind} ${names[id]}` : actor; };
const recordOf = ({ subject, names }) => names[subject] ?? subject;

const COLUMNS = [
  timeColumn("at", "Time"),
  { key: "entry", label: "Entry", isNumber: true, value: (row) => row.entry },
  { key: "action", label: "Action", value: (row) => row.action },
  { key: "actor", label: "By", value: whoOf, cell: (row) => html`<span title=${row.actor}>${visible(whoOf(row))}</span>` },
  { key: "subject", label: "Record", value: recordOf, cell: (row) => html`<span title=${row.subject}>${visible(recordOf(row))}</span>` },
  { key: "details", label: "Change", value: describe, cell: (row) => html`<span title=${describe(row)}>${describe(row)}</span>` },
];
