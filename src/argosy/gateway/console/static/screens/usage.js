// Usage and cost: sums of the ledger by tenant, key, user, model, replica, route and day.
import { html, useEffect, useMemo, useState } from "../vendor.js";
import { get, may, query, useResource } from "../core/api.js";
import { count, exact, money, percent, visible } from "../core/format.js";
import { PAGE_ROWS, usePages } from "../core/pages.js";
import { route, setQuery } from "../core/router.js";
import { useNames } from "../ui/names.js";
import { Card, Field, Pill, Resource } from "../ui/parts.js";
import { PrefixDoctor } from "../ui/prefix-doctor.js";
import { Table, currentSort } from "../ui/table.js";

const GROUPS = ["organisation", "project", "key", "user", "model", "replica", "route"];
const MOST_EXPENSIVE = { key: "nano_dollars", isDescending: true };
const DAY_S = 86400;
const RANGES = [["1d", "Today", 0], ["7d", "7 days", 6], ["30d", "30 days", 29], ["90d", "90 days", 89]];

export default function Usage() {
  const { query: { by = may("viewer") ? "project" : "model", range = "7d", model } } = route.value;
  const since = useMemo(() => {
    const today = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
    return today - (RANGES.find(([id]) => id === range)?.[2] ?? 6) * DAY_S;
  }, [range]);
  const path = may("viewer") ? "admin/usage" : "admin/me/usage";
  const label = `Usage by ${by}`;
  const { key: sort, isDescending } = currentSort(label, MOST_EXPENSIVE);
  const paged = may("viewer") ? { sort, order: isDescending ? "desc" : "asc", limit: PAGE_ROWS } : {};
  const { rows, pages, ...report } = usePages(query(path, { since, model, group_by: by, ...paged }), (row) => row[by] ?? "", { every: 30000, cursor: "after" });
  const days = useResource(query(path, { since, model, group_by: "day" }), 30000);
  const names = useNames();
  return html`
    <div class="row"><${Segments} label="Time range, in UTC days" value=${range} options=${RANGES} set=${(id) => setQuery({ range: id })} />
      <${Segments} label="Summed by" value=${by} options=${GROUPS.map((name) => [name, name])} set=${(id) => setQuery({ by: id })} />
      <${Field} label="Model"><input value=${model ?? ""} placeholder="all" onChange=${(event) => setQuery({ model: event.target.value.trim() })} /><//></div>
    <${Card} title="Cost by day" note="UTC days"><${Resource} of=${days} empty="No request ended in this time.">${({ data }) => html`<${Days} rows=${data} />`}<//><//>
    <${Card} title=${label}><${Resource} of=${report} empty="No request ended in this time. Widen the range, or remove the filter.">
      ${() => html`<${Table} label=${label} columns=${columnsFor(by, names)} rows=${rows} rowKey=${(row) => row[by] ?? ""} csv=${`usage-by-${by}.csv`} initialSort=${MOST_EXPENSIVE} pages=${may("viewer") ? pages : null} />`}<//><//>
    ${may("viewer") ? html`<${Budgets} names=${names} /><${PrefixDoctor} model=${model} />` : null}`;
}

function Segments({ label, value, options, set }) {
  return html`<div class="field"><span>${label}</span><div class="seg" role="group" aria-label=${label}>${options.map(([id, text]) => html`
    <button key=${id} aria-pressed=${id === value} onClick=${() => set(id)}>${text}</button>`)}</div></div>`;
}

function Days({ rows }) {
  return html`<${Table} label="Cost by day" columns=${[{ key: "day", label: "Day", value: (row) => row.day }, ...TOTALS]} rows=${rows} rowKey=${(row) => row.day} height=${220} csv="usage-by-day.csv" initialSort=${{ key: "day", isDescending: true }} />`;
}

const TOTALS = [
  { key: "requests", isSorted: true, label: "Requests", isNumber: true, value: (row) => row.requests, cell: (row) => exact(row.requests) },
  { key: "input_tokens", isSorted: true, label: "Input tokens", isNumber: true, value: (row) => row.input_tokens, cell: (row) => exact(row.input_tokens) },
  { key: "cached", label: "Cached", isNumber: true, value: (row) => row.cached_tokens / Math.max(row.input_tokens, 1), cell: (row) => percent(row.input_tokens ? row.cached_tokens / row.input_tokens : undefined) },
  { key: "output_tokens", isSorted: true, label: "Output tokens", isNumber: true, value: (row) => row.output_tokens, cell: (row) => exact(row.output_tokens) },
  { key: "nano_dollars", isSorted: true, label: "Cost", isNumber: true, value: (row) => row.nano_dollars, cell: (row) => html`<span title=${`${exact(row.nano_dollars)} nano-dollars`}>${money(row.nano_dollars)}</span>` },
];
const columnsFor = (by, names) => [{ key: by, label: by, value: (row) => names(row[by]) || "(none)", cell: (row) => visible(names(row[by]) || "(none)") }, ...TOTALS];

// Limits of cost and tokens for a calendar period, with what the ledger has for the present one.
const USED = { nano_dollars: (row) => row.nano_dollars, tokens: (row) => row.input_tokens + row.output_tokens, input_tokens: (row) => row.input_tokens, output_tokens: (row) => row.output_tokens, requests: (row) => row.requests };

function startOf(window) {
  const now = new Date();
  return Date.UTC(now.getUTCFullYear(), now.getUTCMonth(), window === "day" ? now.getUTCDate() : 1) / 1000;
}

function Budgets({ names }) {
  const limits = useResource("admin/limits?limit=1000");
  const [budgets, setBudgets] = useState(null);
  useEffect(() => {
    if (!limits.data) return undefined;
    const controller = new AbortController();
    readBudgets(limits.data.data, controller.signal).then(setBudgets, () => {});
    return () => controller.abort();
  }, [limits.data]);
  return html`<${Card} title="Budgets" note="limits for a day or a month, in UTC"><${Resource} of=${limits} isEmpty=${() => budgets?.length === 0} empty="No limit for a day or a month is set. Set one under Tenants and keys.">
    ${() => (budgets ? html`<${Table} label="Budgets" columns=${budgetColumns(names)} rows=${budgets} rowKey=${(row) => row.id} height=${220} csv="budgets.csv" initialSort=${{ key: "share", isDescending: true }} />` : null)}<//><//>`;
}

async function readBudgets(limits, abort) {
  const shown = limits.filter(({ unit, window }) => USED[unit] && (window === "day" || window === "month"));
  const reports = new Map();
  for (const { owner_kind: kind, window, model } of shown) {
    const path = query("admin/usage", { group_by: kind, since: startOf(window), model });
    if (!reports.has(path)) reports.set(path, get(path, abort));
  }
  return Promise.all(shown.map(async (limit) => {
    const { data } = await reports.get(query("admin/usage", { group_by: limit.owner_kind, since: startOf(limit.window), model: limit.model }));
    const used = data.filter((row) => row[limit.owner_kind] === limit.owner).reduce((sum, row) => sum + USED[limit.unit](row), 0);
    return { ...limit, used };
  }));
}

const amount = (unit, value) => (unit === "nano_dollars" ? money(value) : count(value));
const budgetColumns = (names) => [
  { key: "owner", label: "Owner", value: (row) => names(row.owner), cell: (row) => `${row.owner_kind} ${visible(names(row.owner))}` },
  { key: "model", label: "Model", value: (row) => row.model ?? "all", cell: (row) => visible(row.model ?? "all") },
  { key: "unit", label: "Limit of", value: (row) => `${row.unit === "nano_dollars" ? "cost" : row.unit} each ${row.window}` },
  { key: "used", label: "Used", isNumber: true, value: (row) => row.used, cell: (row) => amount(row.unit, row.used) },
  { key: "amount", label: "Limit", isNumber: true, value: (row) => row.amount, cell: (row) => amount(row.unit, row.amount) },
  { key: "left", label: "Left", isNumber: true, value: (row) => Math.max(0, row.amount - row.used), cell: (row) => amount(row.unit, Math.max(0, row.amount - row.used)) },
  { key: "share", label: "Used of it", isNumber: true, value: (row) => row.used / Math.max(row.amount, 1), cell: (row) => html`<${Pill} kind=${row.used >= row.amount ? "bad" : row.used > 0.8 * row.amount ? "warn" : "ok"}>${percent(row.used / Math.max(row.amount, 1))}<//>` },
];
