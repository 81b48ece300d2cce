// Models and replicas: pools and replicas as the gateway and the fleet's controller see them, and what changed.
import { html, useEffect } from "../vendor.js";
import { query, useResource } from "../core/api.js";
import { visible } from "../core/format.js";
import { replicaChanges } from "../core/live.js";
import { route } from "../core/router.js";
import { Adapters } from "../ui/adapter-table.js";
import { Fleet } from "../ui/fleet-pools.js";
import { Card, Resource } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";
import { Replica } from "./replica.js";

export default function Models() {
  const { parts: [model], query: { replica } } = route.value;
  const pools = useResource("admin/pools", 5000);
  const replicas = useResource(query("admin/replicas", { model }), 5000);
  const events = useResource(query("admin/replicas/events", { model, replica, limit: 200 }), 10000);
  const fleet = useResource("admin/fleet", 3000);
  const actions = useResource(query("admin/events", { replica, limit: 200 }), 5000);
  const changes = replicaChanges.value;
  const reload = () => { pools.reload(); replicas.reload(); events.reload(); };
  useEffect(() => { if (changes) reload(); }, [changes]);
  const names = new Set(fleet.data?.pools.filter((pool) => !model || pool.model === model).map(({ pool }) => pool));
  return html`
    ${replica ? html`<${Replica} key=${replica} name=${replica} replicas=${replicas} reload=${reload} />`
      : html`<${Fleet} fleet=${fleet} known=${pools} replicas=${replicas} model=${model} reload=${reload} />`}
    ${replica ? null : html`<${Adapters} model=${model} />`}
    <${Card} title="What changed" note="status changes that this gateway saw, decisions, and what the fleet's controllers did"><${Resource} of=${events}>
      ${({ data }) => html`<${Table} label="Changes" columns=${CHANGES} rows=${joinChanges(data, (actions.data?.data ?? []).filter(({ pool }) => !model || names.has(pool)))} rowKey=${(row) => row.key} height=${280} csv="changes.csv" />`}<//>
      ${actions.error && actions.error.status !== 404 ? html`<${Resource} of=${actions}>${() => null}<//>` : null}<//>`;
}

// Events of the gateway and of the fleet in one list, latest first.
function joinChanges(seen, done) {
  const rows = [
    ...seen.map((event, index) => ({ ...event, key: `gateway ${event.at} ${index}`, pool: event.model, by: event.actor ?? "",
      change: event.action ? `${event.action}${event.weight === null ? "" : ` ${event.weight}`}` : `${event.previous} → ${event.status}` })),
    ...done.map((event) => ({ ...event, key: event.number, by: event.kind === "decision" ? "an operator" : "controller", change: `${event.kind.replaceAll("_", " ")}${event.outcome ? `: ${event.outcome}` : ""}` })),
  ];
  return rows.sort((first, second) => second.at - first.at);
}

const CHANGES = [
  timeColumn("at", "Time"),
  { key: "pool", label: "Pool", value: (row) => visible(row.pool) }, { key: "replica", label: "Replica", value: (row) => visible(row.replica) },
  { key: "change", label: "Change", value: (row) => row.change, cell: (row) => html`<span title=${row.change}>${row.change}</span>` },
  { key: "by", label: "By", value: (row) => row.by }, { key: "reason", label: "Reason", value: (row) => row.reason, cell: (row) => html`<span title=${visible(row.reason)}>${visible(row.reason)}</span>` },
];
