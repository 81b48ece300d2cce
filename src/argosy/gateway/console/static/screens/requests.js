// Requests: the ledger's latest ones with filters, and one request by its id as a waterfall with a sentence.
import { html } from "../vendor.js";
import { may, query, useResource } from "../core/api.js";
import { duration, exact, money, visible } from "../core/format.js";
import { PAGE_ROWS, usePages } from "../core/pages.js";
import { link, route, setQuery } from "../core/router.js";
import { Card, Field, Name, Resource, Select, Status } from "../ui/parts.js";
import { useNames } from "../ui/names.js";
import { Table, currentSort, timeColumn } from "../ui/table.js";
import { Explanation } from "../ui/explanation.js";

const STATUSES = ["completed", "cancelled", "failed", "stopped", "interrupted", "refused"];

export default function Requests() {
  const { parts: [id] } = route.value;
  return html`<${Search} id=${id} />${id ? html`<${One} key=${id} id=${id} />` : may("viewer") ? html`<${List} />`
    : html`<${Card} title="Find a request"><p class="empty">Every response names its request in the header x-request-id. Enter that id, or the id of the response.</p><//>`}`;
}

function Search({ id }) {
  const find = (event) => {
    event.preventDefault();
    const wanted = event.currentTarget.elements.id.value.trim();
    location.hash = wanted ? link("requests", [wanted]) : link("requests");
  };
  return html`<form class="row" role="search" onSubmit=${find}><${Field} label="Request or response id, of any time"><input name="id" size="44" defaultValue=${id ?? ""} spellcheck=${false} /><//>
    <button class="btn primary">Explain</button>${id && may("viewer") ? html`<a href=${link("requests")}>All requests</a>` : null}</form>`;
}

function One({ id }) {
  const request = useResource(`admin/requests/${encodeURIComponent(id)}`);
  return html`<${Resource} of=${request} isEmpty=${() => false} height=${240}>${(explanation) => html`<${Explanation} explanation=${explanation} />`}<//>`;
}

function List() {
  const { query: given } = route.value;
  const { model, status, project, key, min_duration_s: minDuration } = given;
  const sort = currentSort("Requests");
  const { find } = useNames();
  const path = query("admin/requests", { model, status, project: find(project, "proj_"), key: find(key, "key_"), min_duration_s: minDuration, sort: sort?.key, order: sort && (sort.isDescending ? "desc" : "asc"), limit: PAGE_ROWS });
  const { rows, pages, ...first } = usePages(path, (row) => row.request);
  const set = (name) => (event) => setQuery({ [name]: event.target.value.trim() });
  return html`<${Card} title="Ended requests" note=${`from the ledger, ${sort ? "the latest 100\u202f000 sorted" : "latest first"}`} actions=${sort ? html`<button class="btn" onClick=${() => setQuery({ sort_requests: "" })}>Latest first</button>` : null}>
    <div class="row"><${Field} label="Model"><input value=${model ?? ""} onChange=${set("model")} /><//><${Field} label="Project, name or id"><input value=${project ?? ""} onChange=${set("project")} /><//>
      <${Field} label="Key, name or id"><input value=${key ?? ""} onChange=${set("key")} /><//>
      <${Select} label="Status" value=${status ?? ""} options=${[["", "any"], ...STATUSES.map((name) => [name, name])]} onChange=${(value) => setQuery({ status: value })} />
      <${Field} label="At least (s)"><input type="number" min="0" step="0.1" value=${minDuration ?? ""} onChange=${set("min_duration_s")} /><//></div>
    <${Resource} of=${first} height=${300} isEmpty=${() => rows.length === 0 && !pages.hasMore}
      empty=${Object.keys(given).length ? "No request matches these filters. Remove one of them." : html`No request has ended yet. <a href=${link("playground")}>Send one from the playground</a>`}>
      ${() => html`<${Table} label="Requests" columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.request} csv="requests.csv" pages=${pages} />`}<//><//>`;
}

const COLUMNS = [
  timeColumn("started_at", "Started"),
  { key: "request", label: "Request", value: (row) => row.request, cell: (row) => html`<a href=${link("requests", [row.request])}><${Name} value=${row.request.length > 24 ? `${row.request.slice(0, 16)}…${row.request.slice(-6)}` : row.request} /></a>` },
  { key: "model", label: "Model", value: (row) => visible(row.model) },
  { key: "project", label: "Project", value: (row) => row.project_name, cell: (row) => html`<span title=${row.project}>${visible(row.project_name)}</span>` },
  { key: "key", label: "Key", value: (row) => row.key_name, cell: (row) => html`<span title=${row.key}>${visible(row.key_name)}</span>` },
  { key: "status", label: "Status", value: (row) => row.status, cell: (row) => html`<${Status} value=${row.status} />` },
  { key: "duration_s", isSorted: true, label: "Duration", isNumber: true, value: (row) => row.duration_s, cell: (row) => duration(row.duration_s) },
  { key: "input_tokens", isSorted: true, label: "Input tokens", isNumber: true, value: (row) => row.input_tokens, cell: (row) => exact(row.input_tokens) },
  { key: "cached_tokens", isSorted: true, label: "Cached", isNumber: true, value: (row) => row.cached_tokens, cell: (row) => exact(row.cached_tokens) },
  { key: "output_tokens", isSorted: true, label: "Output tokens", isNumber: true, value: (row) => row.output_tokens, cell: (row) => exact(row.output_tokens) },
  { key: "nano_dollars", isSorted: true, label: "Cost", isNumber: true, value: (row) => row.nano_dollars, cell: (row) => money(row.nano_dollars) },
  { key: "replica", label: "Replica", value: (row) => visible(row.replica) },
  { key: "findings", label: "Content", value: (row) => row.findings, cell: (row) => html`<span title=${visible(row.findings)}>${visible(row.findings)}</span>` },
];
