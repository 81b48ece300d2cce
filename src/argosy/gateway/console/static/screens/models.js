// Models and replicas: each pool with its replicas, the declared fleet behind it, what changed, and the decisions of operators.
import { html, useEffect } from "../vendor.js";
import { query, useResource } from "../core/api.js";
import { MISSING, visible } from "../core/format.js";
import { replicaChanges } from "../core/live.js";
import { link, route } from "../core/router.js";
import { Fleet } from "../ui/fleet-pools.js";
import { Card, Name, Pill, Resource } from "../ui/parts.js";
import { ReplicaTable } from "../ui/replica-table.js";
import { Table, timeColumn } from "../ui/table.js";
import { Replica } from "./replica.js";

export default function Models() {
  const { parts: [model], query: { replica } } = route.value;
  const pools = useResource("admin/pools", 5000);
  const replicas = useResource(query("admin/replicas", { model }), 5000);
  const events = useResource(query("admin/replicas/events", { model, replica, limit: 200 }), 10000);
  const fleet = useResource("admin/fleet", 3000);
  const changes = replicaChanges.value;
  const reload = () => { pools.reload(); replicas.reload(); events.reload(); };
  useEffect(() => { if (changes) reload(); }, [changes]);
  return html`
    ${replica ? html`<${Replica} key=${replica} name=${replica} replicas=${replicas} reload=${reload} />` : null}
    <${Card} title="Pools" actions=${model ? html`<a href=${link("models")}>All models</a>` : null}><${Resource} of=${pools} empty="No model is configured. Add one to the gateway's settings, or apply a fleet.">
      ${({ data }) => html`<${Table} label="Pools" columns=${POOL_COLUMNS} rows=${data} rowKey=${(row) => `${row.model} ${row.version}`} height=${240} />`}<//><//>
    <${Card} title=${model ? `Replicas of ${visible(model)}` : "Replicas"}><${Resource} of=${replicas} empty="The pool has no replica.">
      ${({ data }) => html`<${ReplicaTable} replicas=${data} height=${420} reload=${reload} csv="replicas.csv" />`}<//><//>
    ${replica ? null : html`<${Fleet} fleet=${fleet} model=${model} />`}
    <${Card} title="What changed" note="status changes that this gateway saw, and decisions"><${Resource} of=${events} empty="Nothing changed since this gateway started.">
      ${({ data }) => html`<${Table} label="Changes" columns=${EVENT_COLUMNS} rows=${data.map((event, index) => ({ ...event, index }))} rowKey=${(row) => `${row.at} ${row.index}`} height=${280} csv="replica-events.csv" />`}<//><//>
    <${FleetEvents} replica=${replica} />`;
}

// The log of the fleet's controllers, if the gateway belongs to a declared fleet.
function FleetEvents({ replica }) {
  const events = useResource(query("admin/events", { replica, limit: 200 }), 5000);
  if (events.error?.status === 404) return null;
  return html`<${Card} title="What the controllers did"><${Resource} of=${events} empty="The controllers of the fleet have done nothing yet.">
    ${({ data }) => html`<${Table} label="Events of the fleet" columns=${FLEET_COLUMNS} rows=${[...data].reverse()} rowKey=${(row) => row.number} height=${280} csv="fleet-events.csv" />`}<//><//>`;
}

const POOL_COLUMNS = [
  { key: "model", label: "Model", value: (row) => row.model, cell: (row) => html`<a href=${link("models", [row.model])}>${visible(row.model)}</a>` },
  { key: "version", label: "Version", value: (row) => row.version, cell: (row) => (row.version ? html`<${Name} value=${row.version.slice(0, 12)} />` : MISSING) },
  { key: "ready", label: "Ready", isNumber: true, value: (row) => row.statuses.ready ?? 0, cell: (row) => `${row.statuses.ready ?? 0} of ${row.replicas}` },
  { key: "other", label: "Others", value: (row) => Object.entries(row.statuses).filter(([name]) => name !== "ready").map(([name, number]) => `${number} ${name}`).join(", ") },
  { key: "active_requests", label: "Requests here", isNumber: true, value: (row) => row.active_requests },
  { key: "routing", label: "Routing", value: (row) => row.routing },
  { key: "is_mixed", label: "Streams resume", value: (row) => !row.is_mixed, cell: (row) => (row.is_mixed ? html`<${Pill} kind="warn">not on all replicas<//>` : html`<${Pill} kind="ok">on all replicas<//>`) },
];
const EVENT_COLUMNS = [
  timeColumn("at", "Time"),
  { key: "model", label: "Model", value: (row) => visible(row.model) }, { key: "replica", label: "Replica", value: (row) => visible(row.replica) },
  { key: "change", label: "Change", value: (row) => (row.action ? `${row.action}${row.weight === null ? "" : ` ${row.weight}`}` : `${row.previous} → ${row.status}`) },
  { key: "actor", label: "By", value: (row) => row.actor ?? "" }, { key: "reason", label: "Reason", value: (row) => row.reason },
];
const FLEET_COLUMNS = [
  timeColumn("at", "Time"),
  { key: "kind", label: "Event", value: (row) => row.kind }, { key: "pool", label: "Pool", value: (row) => visible(row.pool) },
  { key: "replica", label: "Replica", value: (row) => visible(row.replica) }, { key: "outcome", label: "Outcome", value: (row) => row.outcome }, { key: "reason", label: "Reason", value: (row) => row.reason },
];
