// Events and audit: what changed in accounts and decisions, and whether the log is complete.
import { html } from "../vendor.js";
import { get, may, query } from "../core/api.js";
import { exact, visible } from "../core/format.js";
import { PAGE_ROWS, usePages } from "../core/pages.js";
import { route, setQuery } from "../core/router.js";
import { Action, Card, Field, Name, Resource, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

export default function Events() {
  const { query: { subject } } = route.value;
  const { rows, pages, ...first } = usePages(query("admin/audit", { subject, limit: PAGE_ROWS }), (row) => row.entry);
  const verify = async () => {
    const verdict = await get("admin/audit/verify");
    notify(verdict.problem ? `The log is damaged: ${verdict.problem}` : verdict.entries === 1 ? "The only entry is there and unaltered." : `All ${exact(verdict.entries)} entries are there and unaltered.`, verdict.problem ? "bad" : "ok");
  };
  return html`<${Card} title="Audit log" note="account changes and decisions, newest first" actions=${may("viewer", "gateway") ? html`<${Action} run=${verify}>Verify<//>` : null}>
    <div class="row"><${Field} label="Id of the changed record"><input value=${subject ?? ""} onChange=${(event) => setQuery({ subject: event.target.value.trim() })} /><//></div>
    <${Resource} of=${first} isEmpty=${() => rows.length === 0} empty=${subject ? "No change of this record is in the log." : "Nothing was changed yet. Keys, limits, prices and decisions about replicas appear here."}>
      ${() => html`<${Table} label="Audit log" columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.entry} csv="audit.csv" pages=${pages} />`}<//><//>`;
}

// Details as "name: old → new", which is how a change is read.
const describe = (details) => Object.entries(details).map(([name, value]) => `${name}: ${Array.isArray(value) && value.length === 2 ? `${show(value[0])} → ${show(value[1])}` : show(value)}`).join("; ");
const show = (value) => (typeof value === "string" ? visible(value) : JSON.stringify(value));

const COLUMNS = [
  timeColumn("at", "Time"),
  { key: "entry", label: "Entry", isNumber: true, value: (row) => row.entry },
  { key: "action", label: "Action", value: (row) => row.action },
  { key: "actor", label: "By", value: (row) => row.actor, cell: (row) => html`<${Name} value=${row.actor} />` },
  { key: "subject", label: "Record", value: (row) => row.subject, cell: (row) => html`<${Name} value=${row.subject} />` },
  { key: "details", label: "Change", value: (row) => describe(row.details), cell: (row) => html`<span title=${describe(row.details)}>${describe(row.details)}</span>` },
];
