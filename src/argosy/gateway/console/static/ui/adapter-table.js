// The table of adapters (LoRA): versions, rollouts, and the replicas that keep them.
import { html, useState } from "../vendor.js";
import { call, may, post, useResource } from "../core/api.js";
import { bytes, partOf, shortDigests, visible } from "../core/format.js";
import { FormDialog } from "./form-dialog.js";
import { useNames } from "./names.js";
import { Action, Card, Resource } from "./parts.js";
import { Table } from "./table.js";

const FIELDS = [
  { name: "name", label: "Name", isRequired: true, hint: "Model name of requests. A known name gets a candidate, which is rolled out." },
  { name: "base_model", label: "Base model", isRequired: true }, { name: "digest", label: "Digest", isRequired: true, hint: "sha256:..., as `argosy models pull` prints it." },
  { name: "organisation", label: "Organisation id", hint: "Empty: your organisation, or all callers for a role of the whole gateway." }, { name: "project", label: "Project id" },
];

// The buttons of one adapter. Those of a fleet file are changed there.
function AdapterActions({ adapter, reload }) {
  if (!may("operator", adapter.organisation ? "organisation" : "gateway") || adapter.id.startsWith("declared/")) return null;
  const path = `admin/adapters/${encodeURIComponent(adapter.id)}`;
  const change = (body) => async () => { await call("PATCH", path, body); await reload(); };
  return html`<${Action} done=${`${adapter.name} is changed.`} run=${change({ pinned: !adapter.pinned })}>${adapter.pinned ? "Unpin" : "Pin"}<//>
    ${adapter.candidate ? html`<${Action} done=${`The candidate answers all requests for ${adapter.name}.`} confirm=${`Let the candidate answer all requests for ${adapter.name} now?`}
        run=${async () => { await post(`${path}/promote`); await reload(); }}>Promote<//>
      <${Action} done=${`The candidate of ${adapter.name} answers nobody.`} run=${change({ candidate_percent: 0 })}>Take back<//>` : null}
    <${Action} done=${`${adapter.name} is removed.`} confirm=${`Remove ${adapter.name}? Requests that name it are refused from then on.`} run=${async () => { await call("DELETE", path); await reload(); }}>Unload<//>`;
}

const describe = ({ replica, is_wanted, is_loaded, has_candidate, size_bytes }) =>
  `${replica}: ${[is_wanted && "wanted", is_loaded && `loaded${size_bytes ? `, ${bytes(size_bytes)}` : ""}`, has_candidate && "candidate loaded"].filter(Boolean).join(", ") || "not loaded"}`;

// `model` shows the adapters of one base model only.
export function Adapters({ model }) {
  const [isAdding, setAdding] = useState(false);
  const adapters = useResource("admin/adapters?limit=1000", 5000);
  const nameOf = useNames();
  const columns = [
    { key: "name", label: "Adapter", value: (row) => visible(row.name) }, { key: "base", label: "Base model", value: (row) => visible(row.base_model) },
    { key: "owner", label: "Owner", value: (row) => [row.organisation, row.project].filter(Boolean).map((id) => visible(nameOf(id))).join("/") || "all" },
    { key: "version", label: "Version", value: (row) => row.digest, cell: (row) => html`<span title=${row.digest}>${shortDigests(row.digest)}</span>` },
    { key: "candidate", label: "Candidate", value: (row) => row.candidate ?? "", cell: (row) => html`<span title=${row.candidate ?? ""}>${shortDigests(row.candidate ?? "")}</span>` },
    { key: "rollout", label: "Rollout", value: (row) => row.rollout_status, cell: (row) => html`<span title=${visible(row.rollout_status)}>${visible(row.rollout_status)}</span>` },
    { key: "loaded", label: "Loaded / wanted", isNumber: true, value: (row) => row.resident_replicas,
      cell: (row) => html`<span title=${row.replicas.map(describe).map(visible).join("\n")}>${row.resident_replicas} / ${row.wanted_replicas}</span>` },
    { key: "bytes", label: "Memory", isNumber: true, value: (row) => row.size_bytes, cell: (row) => bytes(row.size_bytes || null) },
    { key: "actions", label: "", value: () => "", cell: (row) => html`<${AdapterActions} adapter=${row} reload=${adapters.reload} />` },
  ];
  const isShown = ({ base_model }) => !model || base_model === model;
  const rows = (adapters.data?.data ?? []).filter(isShown);
  if (!rows.length && !may("operator")) return null;
  const loaded = rows.filter(({ resident_replicas }) => resident_replicas).length;
  return html`<${Card} title="Adapters" note=${`${partOf(loaded, rows.length, "adapter")} loaded somewhere`}><${Resource} of=${adapters}>
    ${() => html`<${Table} label="Adapters" columns=${columns} rows=${rows} rowKey=${(row) => `${row.id}\n${row.organisation}`} height=${280} csv="adapters.csv" />`}<//>
    ${may("operator") ? html`<div class="row tail"><button type="button" class="btn" onClick=${() => setAdding(true)}>Load an adapter</button></div>` : null}
    ${isAdding ? html`<${FormDialog} title="Load an adapter" submit="Load" fields=${FIELDS} close=${() => setAdding(false)} save=${async (values) => { await post("admin/adapters", values); await adapters.reload(); }} />` : null}<//>`;
}
