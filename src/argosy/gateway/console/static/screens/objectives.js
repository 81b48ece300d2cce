// Objectives: error budgets, how fast they burn, and what the misses have in common.
import { html } from "../vendor.js";
import { useResource } from "../core/api.js";
import { exact, partOf, percent, significant, visible } from "../core/format.js";
import { link, route } from "../core/router.js";
import { Card, Pill, Resource } from "../ui/parts.js";
import { Table } from "../ui/table.js";

const NONE = "No objective is declared. Add objectives.slos to the settings, as docs/how-to/objectives.md shows.";
const KINDS = { causes: "By cause", replicas: "By replica", versions: "By version", tenants: "By tenant" };

export default function Objectives() {
  const [name] = route.value.parts;
  return name ? html`<${Objective} key=${name} name=${name} />` : html`<${List} />`;
}

function List() {
  const objectives = useResource("admin/objectives", 10000);
  return html`<${Card} title="Error budgets" note="what may still miss"><${Resource} of=${objectives} empty=${NONE}>${({ data }) => html`
    <${Problem} text=${data[0].problem} /><${Table} label="Error budgets" columns=${COLUMNS} rows=${data} rowKey=${(row) => row.name} csv="error-budgets.csv" initialSort=${{ key: "left" }} />`}<//><//>`;
}

function Objective({ name }) {
  const details = useResource(`admin/objectives/${encodeURIComponent(name)}`, 10000);
  return html`<${Resource} of=${details} height=${240}>${({ objective, recent, ...misses }) => html`
    <${Card} title=${visible(objective.name)} actions=${state(objective)}><${Problem} text=${objective.problem} />
      <p>${visible(objective.target)}.</p><p class="explanation">${visible(objective.explanation)}</p>
      <dl class="facts"><dt>Budget left</dt><dd>${left(objective)}</dd><dt>Misses</dt><dd>${partOf(objective.misses, objective.requests, objective.sli === "itl" ? "token" : "request")}</dd></dl>
      <p class="tail"><a href=${link("objectives")}>All objectives</a></p><//>
    ${Object.entries(KINDS).map(([kind, title]) => html`<${Misses} key=${kind} title=${title} counts=${misses[kind]} total=${objective.misses} />`)}
    ${recent.length ? html`<${Card} title="Recent misses" note="explained for an hour"><ul class="tail">${recent.map((id) => html`<li key=${id}><a href=${link("requests", [id])}><code>${visible(id)}</code></a></li>`)}</ul><//>` : null}`}<//>`;
}

function Misses({ title, counts, total }) {
  const rows = Object.entries(counts).map(([value, misses]) => ({ value, misses, share: misses / Math.max(total, 1) }));
  return rows.length ? html`<${Card} title=${title}><${Table} label=${title} columns=${MISS_COLUMNS} rows=${rows} rowKey=${(row) => row.value} height=${220} initialSort=${{ key: "misses", isDescending: true }} /><//>` : null;
}

const Problem = ({ text }) => (text ? html`<p class="note" role="status"><${Pill} kind="warn">incomplete<//> Alerts keep their state: ${visible(text)}.</p>` : null);

function state({ is_outage: isOutage, is_paging: isPaging, is_ticketing: isTicketing, remaining }) {
  if (isOutage) return html`<${Pill} kind="bad">outage<//>`;
  if (isPaging) return html`<${Pill} kind="bad">burns fast<//>`;
  if (isTicketing) return html`<${Pill} kind="warn">burns<//>`;
  return remaining !== null && remaining <= 0 ? html`<${Pill} kind="bad">spent<//>` : html`<${Pill} kind="ok">ok<//>`;
}

const left = ({ remaining }) => (remaining === null ? "unknown" : remaining < 0 ? `−${percent(-remaining)}` : percent(remaining));

const COLUMNS = [
  { key: "name", label: "Name", value: (row) => row.name, cell: (row) => html`<a href=${link("objectives", [row.name])} title=${visible(row.explanation)}>${visible(row.name)}</a>` },
  { key: "state", label: "State", value: (row) => [row.is_outage, row.is_paging, row.is_ticketing].indexOf(true), cell: state },
  { key: "left", label: "Left", isNumber: true, value: (row) => row.remaining ?? 2, cell: left },
  { key: "burn", label: "Burn", isNumber: true, value: (row) => row.burn_rate, cell: (row) => `${significant(row.burn_rate)}×` },
  { key: "misses", label: "Misses", isNumber: true, value: (row) => row.misses, cell: (row) => exact(row.misses) },
  { key: "target", label: "Target", value: (row) => row.target, cell: (row) => visible(row.target) },
];
const MISS_COLUMNS = [
  { key: "value", label: "Value", value: (row) => row.value, cell: (row) => html`<code>${visible(row.value)}</code>` },
  { key: "misses", label: "Misses", isNumber: true, value: (row) => row.misses, cell: (row) => exact(row.misses) },
  { key: "share", label: "Share", isNumber: true, value: (row) => row.share, cell: (row) => percent(row.share) },
];
